//! What is wrong is said in one line with the cure, ends with 1 or 2, and changes nothing.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Result, ensure};

use crate::room::{Kind, Room, bytes};

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
    for args in [&["check-config"][..], &["run"], &["dispatch"]] {
        let complaint = room.refuses(2, args)?;
        let places: Vec<&str> =
            complaint.lines().filter_map(|line| line.strip_prefix("postbox: ")?.split(": ").next()).collect();
        ensure!(places == ["postbox.toml:2", "postbox.toml:3", "postbox.toml:5"], "{args:?}: {complaint}");
        ensure!(complaint.contains("did you mean `batch`?") && complaint.contains("NOT_THERE"), "{complaint}");
    }
    Ok(())
}

#[tokio::test]
async fn a_missing_secret_stops_who_delivers_and_not_who_looks() -> Result<()> {
    let room = Room::migrated(Kind::Sqlite).await?;
    room.config("[subscriptions.a]\nsink = { type = \"http\", url = \"https://h/\", secret = \"env:NOT_THERE\" }\n")?;
    let complaint = room.refuses(2, &["dispatch"])?;
    one_line(&complaint)?;
    ensure!(complaint.contains("NOT_THERE"));
    room.ok(&["stats"])?;
    Ok(())
}

#[tokio::test]
async fn a_store_without_schema_is_told_and_left_alone() -> Result<()> {
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let room = Room::empty(kind).await?;
        room.config("[subscriptions.a]\nsink = { type = \"stdout\" }\n")?;
        for args in
            [&["run"][..], &["dispatch"], &["stats"], &["list", "--state", "dead"], &["prune", "--older-than", "1d"]]
        {
            let complaint = room.refuses(1, args)?;
            one_line(&complaint)?;
            ensure!(complaint.contains("migrate up"), "{kind:?} {args:?}: {complaint}");
        }
        ensure!(bytes(&room.path("postbox.db")).is_none_or(|bytes| bytes.is_empty()), "a database was made");
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
        for args in
            [&["run"][..], &["dispatch"], &["migrate", "up"], &["migrate", "down", "--yes"], &["migrate", "validate"]]
        {
            let complaint = room.refuses(1, args)?;
            one_line(&complaint)?;
            ensure!(complaint.contains("newer"), "{kind:?} {args:?}: {complaint}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_store_out_of_reach_is_told_without_its_password() -> Result<()> {
    let room = Room::empty(Kind::Sqlite).await?;
    let nobody = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let url = format!("postgres://u:hunter2@{nobody}/db");
    for args in [&["stats", "--store", &url][..], &["migrate", "up", "--store", &url], &["run", "--store", &url]] {
        let complaint = room.refuses(1, args)?;
        one_line(&complaint)?;
        ensure!(!complaint.contains("hunter2"), "{complaint}");
    }
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
    let complaint = room.refuses(1, &["run", "--log-level", "error"])?;
    one_line(&complaint)?;
    ensure!(complaint.contains("is in use") && complaint.contains("[server] listen"), "{complaint}");
    ensure!(room.lines("out.jsonl")?.is_empty());
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
