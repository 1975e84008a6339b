//! A Postgres database that is filled and read with psql only, as by a program in any language.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::servers::Postgres;

use crate::endpoint::{Endpoint, firsts, takes_all};
use crate::env::{FILE_SINK, Kind, TestEnv};

/// Transactions of an application: some commit, one rolls back, one rolls back to a savepoint.
const SHOP: &str = r#"
CREATE TABLE orders (id int PRIMARY KEY, total int);
BEGIN;
INSERT INTO orders VALUES (1, 10);
SELECT postbox.enqueue(topic => 'order.placed', payload => '{"n":1}', key => 'ok');
COMMIT;
BEGIN;
INSERT INTO orders VALUES (2, 20);
SELECT postbox.enqueue(topic => 'order.placed', payload => '{"n":-2}', key => 'ok');
ROLLBACK;
BEGIN;
SAVEPOINT regret;
SELECT postbox.enqueue('order.placed', '{"n":-3}');
ROLLBACK TO SAVEPOINT regret;
SELECT postbox.enqueue('order.paid', jsonb_build_object('n', 2), key => 'ok', headers => '{"traceparent":"00-1"}');
COMMIT;
INSERT INTO postbox.outbox (topic, key, payload) VALUES ('order.placed', 'bad', '{"n":3}'), ('order.paid', 'ok', '{"n":4}');
INSERT INTO postbox.outbox (topic, key, payload) SELECT 'order.shipped', 'ok', json_build_object('n', n) FROM generate_series(5, 6) AS n;
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_filled_from_psql_only_is_relayed() -> Result<()> {
    let env = TestEnv::empty(Kind::Postgres).await?;
    let endpoint = Endpoint::start(|key| (if key == "bad" { 422 } else { 204 }, Duration::ZERO))?;
    env.config(&endpoint.subscription("out"))?;
    ensure!(env.ok(&["migrate", "up"])?.contains("the schema is ready"));
    let ids = Postgres::psql(&env.url, SHOP);
    let all_ids = ids.lines().count() == 4 && ids.lines().all(|id| id.len() == 36);
    ensure!(all_ids, "enqueue answers with the event id: {ids}");
    ensure!(env.ok(&["stats"])? == "pending=6 dispatched=0 dead=0 total=6\n");

    ensure!(env.ok(&["dispatch", "--limit", "1"])? == "fetched=1 dispatched=1 failed=0 dead=0\n");
    ensure!(env.ok(&["stats"])? == "pending=5 dispatched=1 dead=0 total=6\n");

    let relay = env.serve().await?;
    endpoint.until("the backlog", |arrivals| firsts(arrivals, "ok") == [1, 2, 4, 5, 6]).await?;
    // While the relay runs, psql is all that an application needs.
    Postgres::psql(&env.url, "SELECT postbox.enqueue('order.placed', '{\"n\":7}'::bytea, key => 'ok')");
    endpoint.until("the newcomer", |arrivals| firsts(arrivals, "ok") == [1, 2, 4, 5, 6, 7]).await?;
    relay.terminate().await?;
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=6 dead=1 total=7\n");

    let dead = env.json(&["list", "--state", "dead", "--json"])?;
    ensure!(dead[0]["code"] == "http_422" && dead[0]["event"]["key"] == "bad", "{dead}");
    let id = dead[0]["event"]["id"].as_str().context("an id")?;
    ensure!(Postgres::psql(&env.url, &format!("SELECT key FROM postbox.outbox WHERE id = '{id}'")) == "bad\n");
    endpoint.set(takes_all);
    ensure!(env.ok(&["retry", id])? == "retried=1\n");
    ensure!(env.ok(&["dispatch"])? == "fetched=1 dispatched=1 failed=0 dead=0\n");
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=7 dead=0 total=7\n");
    let arrivals = endpoint.arrivals();
    ensure!(firsts(&arrivals, "bad") == [3] && arrivals.len() == 8, "{arrivals:?}");
    Ok(())
}

/// A writer with the printed grants, and nothing else.
#[tokio::test]
async fn the_printed_rights_are_run_by_psql() -> Result<()> {
    let env = TestEnv::migrated(Kind::Postgres).await?;
    let role = format!("e2e_writer_{}", std::process::id());
    Postgres::psql(&env.url, &format!("CREATE ROLE {role};"));
    let grants = env.ok(&["migrate", "grants", "--writer", &role])?;
    Postgres::psql(&env.url, &grants);
    let enqueue = format!("SET ROLE {role}; SELECT postbox.enqueue('t', '{{}}'::bytea, log => 'outbox');");
    Postgres::psql(&env.url, &enqueue);
    ensure!(env.ok(&["stats"])? == "pending=1 dispatched=0 dead=0 total=1\n");
    Postgres::psql(&env.url, &format!("DROP OWNED BY {role}; DROP ROLE {role};"));
    env.refuses(2, &["migrate", "grants"])?;
    let other = TestEnv::migrated(Kind::Sqlite).await?;
    ensure!(other.refuses(1, &["migrate", "grants", "--writer", "a"])?.contains("only a Postgres store has roles"));
    Ok(())
}

/// A reader with the printed grants looks at everything, before the first run and after one, and
/// changes nothing.
#[tokio::test]
async fn the_printed_rights_of_a_reader_are_enough_to_look() -> Result<()> {
    let env = TestEnv::with(Kind::Postgres, FILE_SINK).await?;
    let role = format!("e2e_reader_{}", std::process::id());
    Postgres::psql(&env.url, &format!("CREATE ROLE {role} LOGIN;"));
    Postgres::psql(&env.url, &env.ok(&["migrate", "grants", "--reader", &role])?);
    let reader = env.as_role(&role, FILE_SINK)?;
    env.insert_three().await?;
    let id = Postgres::psql(&env.url, "SELECT id FROM postbox.outbox LIMIT 1");
    for has_run in [false, true] {
        if has_run {
            ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
        }
        let before = env.snapshot().await?;
        for args in [
            &["stats"][..],
            &["list"],
            &["list", "--state", "conflict"],
            &["show", id.trim_end()],
            &["doctor"],
            &["subscription", "list"],
            &["subscription", "show", "out"],
            &["migrate", "validate"],
            &["retry", "--all", "--dry-run"],
            &["prune", "--older-than", "0s", "--dry-run"],
        ] {
            let (owned, looked) = (env.output(args)?, reader.output(args)?);
            let said = String::from_utf8([looked.stdout, looked.stderr].concat())?;
            let same = looked.status.code() == owned.status.code();
            ensure!(same && !said.contains("permission"), "{args:?}, run: {has_run}: {}: {said}", looked.status);
        }
        ensure!(env.snapshot().await? == before, "run: {has_run}: a look has changed something");
    }
    for args in [&["pause", "out"][..], &["dispatch"]] {
        let refused = reader.refuses(1, args)?;
        ensure!(refused.contains("permission_denied"), "{refused}");
    }
    // So the check fails as well, unless nothing is to be delivered.
    let refused = reader.output(&["check-config", "--connect"])?;
    let said = String::from_utf8(refused.stderr)?;
    ensure!(refused.status.code() == Some(1) && said.contains("(permission_denied)"), "{said}");
    reader.config("")?;
    reader.ok(&["check-config", "--connect"])?;
    Postgres::psql(&env.url, &format!("DROP OWNED BY {role}; DROP ROLE {role};"));
    Ok(())
}
