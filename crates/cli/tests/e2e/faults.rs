//! What is wrong is said in one line with the cure, ends with 1 or 2, and changes nothing.

use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::endpoint::Shut;
use crate::room::{Kind, Room, bytes, complaint};

fn one_line(complaint: &str) -> Result<()> {
    ensure!(complaint.lines().count() == 1, "more than one line: {complaint}");
    Ok(())
}

#[tokio::test]
async fn wrong_usage_ends_with_2() -> Result<()> {
    let room = Room::migrated(Kind::Sqlite).await?;
    for args in [
        &["frobnicate"][..],
        &[],
        &["list"],
        &["list", "--state", "lost"],
        &["list", "--state", "dead", "--limit", "0"],
        &["show", "not-an-id"],
        &["retry"],
        &["discard"],
        &["prune"],
        &["prune", "--older-than", "soon"],
        &["pause", "no name"],
        &["dispatch", "--limit", "0"],
        &["stats", "--store", "mysql://h/db"],
        &["stats", "--subscription", "nobody"],
        &["dispatch", "--subscription", "nobody"],
        &["stats", "--config", "missing.toml"],
        &["stats", "--log-level", "=="],
        &["demo", "--orders", "0"],
    ] {
        room.refuses(2, args)?;
    }
    Ok(())
}

#[tokio::test]
async fn every_fault_of_a_configuration_is_listed_at_its_line() -> Result<()> {
    let room = Room::migrated(Kind::Sqlite).await?;
    std::fs::write(
        room.path("postbox.toml"),
        "[subscriptions.a]\nbatsh = 1\nsink = { type = \"http\", url = \"https://h/\", secret = \"env:NOT_THERE\" }\n[server]\nlisten = \"here\"\n",
    )?;
    let before = room.snapshot().await?;
    for args in [&["check-config"][..], &["run"], &["dispatch"]] {
        let complaint = room.refuses(2, args)?;
        let places: Vec<&str> =
            complaint.lines().filter_map(|line| line.strip_prefix("postbox: ")?.split(": ").next()).collect();
        ensure!(places == ["postbox.toml:2", "postbox.toml:3", "postbox.toml:5"], "{args:?}: {complaint}");
        ensure!(complaint.contains("did you mean `batch`?") && complaint.contains("NOT_THERE"), "{complaint}");
    }
    ensure!(room.snapshot().await? == before, "the store was changed");
    Ok(())
}

#[tokio::test]
async fn a_missing_secret_stops_who_delivers_and_not_who_looks() -> Result<()> {
    let room = Room::migrated(Kind::Sqlite).await?;
    room.config("[subscriptions.a]\nsink = { type = \"http\", url = \"https://h/\", secret = \"env:NOT_THERE\" }\n")?;
    let before = room.snapshot().await?;
    for args in [&["run"][..], &["dispatch"], &["check-config"]] {
        let complaint = room.refuses(2, args)?;
        one_line(&complaint)?;
        ensure!(complaint.contains("postbox.toml:") && complaint.contains("export NOT_THERE="), "{complaint}");
    }
    ensure!(room.snapshot().await? == before, "the store was changed");
    room.ok(&["stats"])?;
    Ok(())
}

#[tokio::test]
async fn a_store_without_schema_is_told_and_left_alone() -> Result<()> {
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let room = Room::empty(kind).await?;
        room.config("[subscriptions.a]\nsink = { type = \"stdout\" }\n")?;
        let before = room.snapshot().await?;
        for args in
            [&["run"][..], &["dispatch"], &["stats"], &["list", "--state", "dead"], &["prune", "--older-than", "1d"]]
        {
            let complaint = room.refuses(1, args)?;
            one_line(&complaint)?;
            ensure!(complaint.contains("migrate up"), "{kind:?} {args:?}: {complaint}");
        }
        ensure!(room.snapshot().await? == before, "something was made");
    }
    Ok(())
}

#[tokio::test]
async fn a_newer_schema_is_told_and_left_alone() -> Result<()> {
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let room = Room::migrated(kind).await?;
        let migration = if kind == Kind::Sqlite { "postbox_migration" } else { "postbox.migration" };
        room.sql(&format!("INSERT INTO {migration} SELECT 9999, 'from_the_future', applied_at FROM {migration}"))
            .await?;
        room.config("[subscriptions.a]\nsink = { type = \"stdout\" }\n")?;
        let before = room.snapshot().await?;
        for args in
            [&["run"][..], &["dispatch"], &["migrate", "up"], &["migrate", "down", "--yes"], &["migrate", "validate"]]
        {
            let complaint = room.refuses(1, args)?;
            one_line(&complaint)?;
            ensure!(complaint.contains("use a newer postbox"), "{kind:?} {args:?}: {complaint}");
        }
        ensure!(room.snapshot().await? == before, "{kind:?}: the store was changed");
    }
    Ok(())
}

#[tokio::test]
async fn a_store_out_of_reach_is_told_without_its_password() -> Result<()> {
    let room = Room::empty(Kind::Sqlite).await?;
    let nobody = Shut::reserve()?;
    let url = nobody.url().replace("http://", "postgres://u:hunter2@") + "db";
    for args in [&["stats", "--store", &url][..], &["migrate", "up", "--store", &url], &["run", "--store", &url]] {
        let complaint = room.refuses(1, args)?;
        one_line(&complaint)?;
        ensure!(!complaint.contains("hunter2"), "{complaint}");
        ensure!(complaint.contains("is it running, and is the store's URL right?"), "{complaint}");
    }
    Ok(())
}

#[tokio::test]
async fn a_database_or_user_that_is_not_there_is_told() -> Result<()> {
    let room = Room::empty(Kind::Postgres).await?;
    let (server, database) = room.url.rsplit_once('/').context("a URL with a database")?;
    let host = server.rsplit_once('@').context("a URL with a user")?.1;
    for (url, cure) in [
        (format!("{server}/no_such_database"), "create it first"),
        (format!("postgres://no_such_user:hunter2@{host}/{database}"), "correct the user or the password"),
    ] {
        for args in [&["stats", "--store", &url][..], &["migrate", "up", "--store", &url], &["run", "--store", &url]] {
            let complaint = room.refuses(1, args)?;
            one_line(&complaint)?;
            ensure!(complaint.contains(cure) && !complaint.contains("hunter2"), "{complaint}");
            ensure!(!complaint.contains("db error"), "a cause that says nothing: {complaint}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_cursor_from_the_future_is_told_with_its_cure() -> Result<()> {
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let room = Room::migrated(kind).await?;
        room.config("[subscriptions.a]\nsink = { type = \"file\", path = \"out.jsonl\" }\n")?;
        room.insert_three().await?;
        ensure!(room.ok(&["dispatch"])?.contains("dispatched=3"));
        // As after a restore of an older copy, or of a dump into a younger cluster.
        room.sql(match kind {
            Kind::Sqlite => "UPDATE postbox_lane SET position = 900, window_end = 900",
            Kind::Postgres => "UPDATE postbox.lane SET from_snap = '9000000:9000000:', to_snap = '9000000:9000000:'",
        })
        .await?;
        let before = room.snapshot().await?;
        for args in [&["dispatch"][..], &["run"]] {
            let complaint = room.refuses(1, args)?;
            one_line(&complaint)?;
            ensure!(complaint.contains("cursor_from_future"), "{kind:?} {args:?}: {complaint}");
        }
        ensure!(room.snapshot().await? == before, "{kind:?}: the store was changed");
        let complaint = room.refuses(1, &["dispatch"])?;
        match kind {
            Kind::Sqlite => {
                let cure = complaint.split("with: ").nth(1).context("a cure")?;
                room.sql(cure.trim_end().trim_end_matches("(cursor_from_future)")).await?;
            }
            Kind::Postgres => {
                ensure!(complaint.contains("postbox migrate rebase"), "{complaint}");
                room.ok(&["migrate", "rebase"])?;
            }
        }
        room.insert_three().await?;
        ensure!(room.dispatch(&[])?.contains("dispatched=3"), "{kind:?}: it was not cured");
    }
    Ok(())
}

/// As `stores/sqlite/README.md` says it is done. The file has the log and the cursors of one moment: nothing has to be put right, what was pending then
/// goes out (again, with its id), and what came after is gone from it. The files beside it belong to what is replaced.
#[tokio::test]
async fn an_older_copy_of_a_sqlite_file_goes_on_from_its_moment() -> Result<()> {
    let room = Room::migrated(Kind::Sqlite).await?;
    room.config("[subscriptions.a]\nsink = { type = \"file\", path = \"out.jsonl\" }\n")?;
    let insert = |n: u32| format!("INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', 'k', '{{\"n\":{n}}}');");
    room.sql(&insert(1)).await?;
    ensure!(room.dispatch(&[])? == "dispatched=1 failed=0 dead=0");
    room.sql(&insert(2)).await?;
    room.sql(&format!("VACUUM INTO '{}'", room.path("copy.db").display())).await?;
    room.sql(&insert(3)).await?;
    // Somebody who was killed left the file without a checkpoint: an open reader does the same.
    let reader = rusqlite::Connection::open(room.path("postbox.db"))?;
    reader.query_row("SELECT count(*) FROM postbox_outbox", [], |row| row.get::<_, i64>(0))?;
    ensure!(room.dispatch(&[])? == "dispatched=2 failed=0 dead=0");
    ensure!(bytes(&room.path("postbox.db-wal")).is_some_and(|left| !left.is_empty()), "nothing was left beside it");

    let [database, left, shared] = ["postbox.db", "postbox.db-wal", "postbox.db-shm"].map(|name| room.path(name));
    let crashed = [&database, &left, &shared].map(|path| bytes(path).unwrap_or_default());
    drop(reader);
    for (path, content) in [&database, &left, &shared].into_iter().zip(crashed) {
        std::fs::write(path, content)?;
    }
    std::fs::remove_file(left)?;
    std::fs::remove_file(shared)?;
    std::fs::copy(room.path("copy.db"), database)?;

    room.ok(&["migrate", "validate"])?;
    ensure!(room.ok(&["stats"])? == "pending=1 dispatched=1 dead=0 total=2\n");
    room.sql(&insert(4)).await?;
    ensure!(room.dispatch(&[])? == "dispatched=2 failed=0 dead=0");
    let lines = room.lines("out.jsonl")?;
    let numbers: Vec<i64> = lines.iter().filter_map(|line| line["payload"]["n"].as_i64()).collect();
    ensure!(numbers == [1, 2, 3, 2, 4], "{numbers:?}");
    ensure!(lines[1]["id"] == lines[3]["id"], "what goes out again has its id");
    Ok(())
}

#[tokio::test]
async fn a_port_in_use_is_told_before_anything_goes_out() -> Result<()> {
    let room = Room::migrated(Kind::Sqlite).await?;
    room.insert_three().await?;
    let holder = TcpListener::bind("127.0.0.1:0")?;
    room.config(&format!(
        "[subscriptions.a]\nsink = {{ type = \"file\", path = \"out.jsonl\" }}\n[server]\nlisten = \"{}\"\n",
        holder.local_addr()?
    ))?;
    let before = room.snapshot().await?;
    let complaint = room.refuses(1, &["run", "--log-level", "error"])?;
    ensure!(room.snapshot().await? == before, "the store was changed");
    one_line(&complaint)?;
    ensure!(complaint.contains("is in use") && complaint.contains("[server] listen"), "{complaint}");
    ensure!(!room.path("out.jsonl").exists(), "the sink was opened");
    Ok(())
}

#[tokio::test]
async fn a_read_only_file_is_told() -> Result<()> {
    let room = Room::migrated(Kind::Sqlite).await?;
    room.insert_three().await?;
    room.config("[subscriptions.a]\nsink = { type = \"file\", path = \"out.jsonl\" }\n")?;
    let path = room.path("postbox.db");
    // Root may write to anything; a database in a format version of the future is read-only for everybody.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444))?;
    let mut bytes_now = std::fs::read(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644))?;
    bytes_now[18] = 3;
    std::fs::write(&path, &bytes_now)?;
    for args in [&["dispatch"][..], &["run"]] {
        let complaint = room.refuses(1, args)?;
        one_line(&complaint)?;
        ensure!(complaint.contains("read-only") && complaint.contains("writable"), "{args:?}: {complaint}");
    }
    ensure!(bytes(&path) == Some(bytes_now), "the file was changed");
    Ok(())
}

#[tokio::test]
async fn a_file_of_somebody_else_is_told() -> Result<()> {
    let room = Room::migrated(Kind::Sqlite).await?;
    room.config("[subscriptions.a]\nsink = { type = \"stdout\" }\n")?;
    room.insert_three().await?;
    // Its own copy, because the folders above the real one may be closed to others.
    let program = room.path("program");
    std::fs::copy(env!("CARGO_BIN_EXE_postbox"), &program)?;
    let folder = room.path(".");
    for (path, mode) in [(&program, 0o755), (&room.path("postbox.db"), 0o444), (&folder, 0o555)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    }
    let before = room.snapshot().await?;
    for args in [&["dispatch"][..], &["run"], &["migrate", "down", "--yes"], &["prune", "--older-than", "0s"]] {
        let mut command = Command::new(&program);
        command.args(args).current_dir(&folder).stdin(Stdio::null()).env("POSTBOX_STORE", &room.url);
        // Root may write everywhere; nobody may not. Who is not root cannot change, and need not.
        if std::fs::metadata("/proc/self")?.uid() == 0 {
            command.uid(65_534).gid(65_534);
        }
        let complaint = complaint(&command.output()?, 1, args)?;
        one_line(&complaint)?;
        ensure!(complaint.contains("postbox.db") && complaint.contains("writable"), "{args:?}: {complaint}");
        ensure!(complaint.matches("read-only").count() == 1, "said twice: {complaint}");
    }
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755))?;
    ensure!(room.snapshot().await? == before, "the file was changed");
    Ok(())
}

#[tokio::test]
async fn what_is_no_database_is_told_and_left_alone() -> Result<()> {
    let room = Room::empty(Kind::Sqlite).await?;
    let path = room.path("postbox.db");
    std::fs::write(&path, "this is a letter, not a database\n".repeat(100))?;
    for args in [&["stats"][..], &["migrate", "up"], &["run"]] {
        one_line(&room.refuses(1, args)?)?;
    }
    ensure!(std::fs::read_to_string(&path)?.starts_with("this is a letter"));
    Ok(())
}
