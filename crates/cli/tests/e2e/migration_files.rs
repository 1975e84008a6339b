//! `postbox migrate print --for TOOL`: the files of each tool, applied as the tool applies them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use tokio_postgres::Client;

use crate::env::{FILE_SINK, Kind, TestEnv};

/// Runs a function of a revision with a fake `alembic` that prints what the driver would get.
const ALEMBIC: &str = r#"
import sys, types
class Bind:
    def exec_driver_sql(self, sql, execution_options):
        assert execution_options == {"no_parameters": True}
        sys.stdout.write(sql)
sys.modules["alembic"] = types.SimpleNamespace(op=types.SimpleNamespace(get_bind=Bind))
revision = {}
exec(open(sys.argv[1]).read(), revision)
assert revision["revision"] in sys.argv[1] and revision["down_revision"] is None
revision[sys.argv[2]]()
"#;

/// A migration tool with one connection, its own schema in the search path, and its history table
/// there.
struct Runner {
    client: Client,
    /// Uses prepared statements, which accept one statement each.
    is_prepared: bool,
}

impl Runner {
    async fn on(env: &TestEnv, is_prepared: bool) -> Result<Self> {
        let client = env.client().await?;
        client
            .batch_execute("CREATE SCHEMA app; SET search_path = app; CREATE TABLE history (n int PRIMARY KEY)")
            .await?;
        Ok(Self { client, is_prepared })
    }

    /// Runs a migration and its history entry in one transaction, and checks that the settings are
    /// as before.
    async fn run(&self, sql: &str, history: &str) -> Result<()> {
        const SETTINGS: &str = "SELECT string_agg(name || '=' || setting, ', ' ORDER BY name) FROM pg_settings
            WHERE name NOT LIKE '%.%' AND name <> 'transaction_isolation'";
        self.client.batch_execute("BEGIN").await?;
        let settings = async || anyhow::Ok(self.client.query_one(SETTINGS, &[]).await?.get::<_, String>(0));
        let before = settings().await?;
        let applied = match self.is_prepared {
            true => self.client.execute(sql, &[]).await.map(drop),
            false => self.client.batch_execute(sql).await,
        };
        if let Err(error) = applied {
            self.client.batch_execute("ROLLBACK").await?;
            let fault = error.as_db_error().with_context(|| error.to_string())?;
            anyhow::bail!("{} {}", fault.message(), fault.hint().unwrap_or_default());
        }
        ensure!(settings().await? == before, "the tool's transaction goes on with other settings");
        self.client.batch_execute(history).await?;
        Ok(self.client.batch_execute("COMMIT").await?)
    }
}

/// The files below a folder, sorted.
fn files(folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().context("a name")?.to_string_lossy().into_owned();
        match path.is_dir() {
            true => found.extend(files(&path)?.into_iter().map(|file| format!("{name}/{file}"))),
            false => found.push(name),
        }
    }
    found.sort();
    Ok(found)
}

fn with_zeros(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect()
}

/// The files of a tool; their names must have these shapes.
fn written(env: &TestEnv, tool: &str, shapes: &[&str]) -> Result<Vec<String>> {
    let said = env.ok(&["migrate", "print", "--for", tool, "--out", "migrations/of/it"])?;
    let names = files(&env.path("migrations/of/it"))?;
    ensure!(names.iter().map(|name| with_zeros(name)).eq(shapes.iter().copied()), "{names:?}");
    ensure!(names.iter().all(|name| said.contains(&format!("wrote migrations/of/it/{name}\n"))), "{said}");
    Ok(names)
}

/// The schema is created, is not removed while it has an event, and is removed without one.
async fn comes_and_goes(env: &TestEnv, up: &str, down: Option<&str>, is_prepared: bool) -> Result<()> {
    let runner = Runner::on(env, is_prepared).await?;
    runner.run(up, "INSERT INTO history VALUES (1)").await?;
    ensure!(env.ok(&["migrate", "validate"])? == "the schema is valid\n");
    ensure!(env.ok(&["migrate", "up"])? == "the schema is up to date\n");
    env.config(FILE_SINK)?;
    env.subscribe()?;
    env.insert_three().await?;
    let twice = runner.run(up, "INSERT INTO history VALUES (2)").await.err().context("it was applied twice")?;
    ensure!(twice.to_string().contains("schema \"postbox\" has Postbox's tables already"), "{twice}");
    ensure!(twice.to_string().contains("postbox migrate validate"), "{twice}");
    let down = match down {
        Some(down) => down,
        None => {
            ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
            ensure!(env.ok(&["migrate", "down", "--yes"])?.contains("the schema is gone"));
            return Ok(());
        }
    };
    let refused = runner.run(down, "DELETE FROM history").await.err().context("three events are thrown away")?;
    ensure!(refused.to_string().contains("log outbox holds events that are not delivered"), "{refused}");
    ensure!(refused.to_string().contains("migrate down --yes --discard-events"), "{refused}");
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    runner.run(down, "DELETE FROM history").await?;
    ensure!(env.refuses(1, &["migrate", "validate"])?.contains("has no Postbox schema"));
    Ok(())
}

#[tokio::test]
async fn sqlx_and_diesel_have_a_file_each_way() -> Result<()> {
    for (tool, shapes) in [
        ("sqlx", ["00000000000000_postbox.down.sql", "00000000000000_postbox.up.sql"]),
        ("diesel", ["0000-00-00-000000_postbox/down.sql", "0000-00-00-000000_postbox/up.sql"]),
    ] {
        let env = TestEnv::empty(Kind::Postgres).await?;
        let names = written(&env, tool, &shapes)?;
        let [down, up] = [0, 1].map(|n| std::fs::read_to_string(env.path("migrations/of/it").join(&names[n])));
        comes_and_goes(&env, &up?, Some(&down?), false).await?;
    }
    Ok(())
}

#[tokio::test]
async fn refinery_and_flyway_have_no_way_back() -> Result<()> {
    for (tool, shape) in [("refinery", "V0__postbox.sql"), ("flyway", "V00000000000000__postbox.sql")] {
        let env = TestEnv::empty(Kind::Postgres).await?;
        let names = written(&env, tool, &[shape])?;
        let up = std::fs::read_to_string(env.path("migrations/of/it").join(&names[0]))?;
        // A placeholder of Flyway.
        ensure!(!up.contains("${"), "{up}");
        comes_and_goes(&env, &up, None, false).await?;
    }
    Ok(())
}

#[tokio::test]
async fn alembic_has_a_revision() -> Result<()> {
    let env = TestEnv::empty(Kind::Postgres).await?;
    let names = written(&env, "alembic", &["00000000000000_postbox.py"])?;
    let path = env.path("migrations/of/it").join(&names[0]);
    let sent = |function: &str| {
        let ran = Command::new("python3").args(["-c", ALEMBIC]).arg(&path).arg(function).output()?;
        ensure!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        Ok(String::from_utf8(ran.stdout)?)
    };
    comes_and_goes(&env, &sent("upgrade")?, Some(&sent("downgrade")?), true).await
}

#[tokio::test]
async fn files_are_named_on_standard_output_and_never_overwritten() -> Result<()> {
    let env = TestEnv::empty(Kind::Postgres).await?;
    for (tool, ends) in [
        ("sqlx", ["up.sql", "down.sql"].as_slice()),
        ("diesel", &["up.sql", "down.sql"]),
        // A single file is printed as it is.
        ("refinery", &[]),
    ] {
        let printed = env.ok(&["migrate", "print", "--for", tool])?;
        let heads = printed.lines().filter(|line| line.starts_with("==> ") && line.ends_with(" <=="));
        let heads: Vec<&str> = heads.collect();
        ensure!(heads.len() == ends.len() && heads.iter().zip(ends).all(|(head, end)| head.contains(end)), "{printed}");
    }
    env.ok(&["migrate", "print", "--for", "refinery", "--out", "."])?;
    std::fs::write(env.path("V1__postbox.sql"), "mine")?;
    let complaint = env.refuses(1, &["migrate", "print", "--for", "refinery", "--out", "."])?;
    ensure!(complaint.contains("V1__postbox.sql exists already"), "{complaint}");
    ensure!(std::fs::read_to_string(env.path("V1__postbox.sql"))? == "mine");
    env.refuses(2, &["migrate", "print", "--out", "."])?;
    env.refuses(2, &["migrate", "print", "--for", "liquibase"])?;

    let other = TestEnv::empty(Kind::Sqlite).await?;
    let complaint = other.refuses(1, &["migrate", "print", "--for", "sqlx"])?;
    ensure!(complaint.contains("Postgres store only") && complaint.contains("postbox migrate up"), "{complaint}");
    ensure!(complaint.contains("--store postgres://"), "{complaint}");
    Ok(())
}
