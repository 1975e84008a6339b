//! The printed rights are sufficient, and no broader than needed.

use postbox_core::{BatchLimit, Change, Criteria, LogName, Prune, Replay, Selection};
use postbox_postgres::{PostgresConfig, PostgresStore, Roles};
use postbox_testkit::servers::{Postgres, Version};

use super::everything::{by_hand, everything};
use crate::support::{self, url_as};

/// With the statements of the guide.
#[tokio::test]
async fn the_printed_rights_suffice_where_public_may_execute_nothing() {
    use postbox_core::Maintain as _;
    let cure = support::sql_of_roles("GRANT EXECUTE ON ALL FUNCTIONS");
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let owner = support::client(&url).await;
    let strict = "ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC";
    owner.batch_execute(strict).await.expect("strict");
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let [writer, reader] = ["strict_writer", "strict_reader"].map(|name| format!("{name}_{}", std::process::id()));
    owner.batch_execute(&format!("CREATE ROLE {writer} LOGIN; CREATE ROLE {reader} LOGIN")).await.expect("roles");
    let roles = Roles { writers: vec![writer.clone()], readers: vec![reader.clone()], ..Roles::default() };
    let grants = store.grants(&roles).await.expect("printed");
    owner.batch_execute(&grants).await.expect(&grants);
    let writing = support::client(&url_as(&url, &writer)).await;
    let reading = support::client(&url_as(&url, &reader)).await;
    let append = "SELECT postbox.enqueue('t', '{}', id => gen_random_uuid())";
    writing.batch_execute(append).await.expect_err("the guide's case");
    owner.batch_execute(cure).await.expect("given back");
    writing.batch_execute(append).await.expect("appended");
    store.create_log(&LogName::new("later").expect("a name")).await.expect("a log");
    for log in ["outbox", "inbox", "later"] {
        let has = format!("SELECT postbox.{log}_has(gen_random_uuid(), 't', NULL, NULL, '1', NULL)");
        let refused = reading.batch_execute(&has).await.expect_err(&has);
        assert_eq!(refused.code().map(|state| state.code()), Some("42501"), "{log}");
    }
    for role in [&writer, &reader] {
        owner.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.expect("cleaned up");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_role_does_its_work_with_the_rights_that_are_printed() {
    for version in Version::ALL {
        let fixture = support::on(version).await;
        let owner = fixture.client().await;
        let [writer, relay, reader] =
            ["writer", "relay", "reader"].map(|name| format!("{name}_{}_{}", version.number(), std::process::id()));
        for role in [&writer, &relay, &reader] {
            owner.batch_execute(&format!("CREATE ROLE {role} LOGIN")).await.expect("a role");
        }
        let roles = Roles {
            writers: vec![writer.clone()],
            relays: vec![relay.clone()],
            readers: vec![reader.clone()],
            ..Roles::default()
        };
        let grants = fixture.store.grants(&roles).await.expect("printed");
        owner.batch_execute(&grants).await.expect(&grants);
        let store = async |role: &str| {
            PostgresStore::connect(PostgresConfig::new(url_as(&fixture.url, role))).await.expect("connected")
        };
        let client = support::client(&url_as(&fixture.url, &writer)).await;
        everything(&store(&writer).await, &client, &store(&relay).await).await;
        by_hand(&support::client(&url_as(&fixture.url, &relay)).await, "postbox").await;
        let relaying = store(&relay).await;
        relaying.check_relay_rights(&[LogName::outbox()]).await.expect("sufficient");
        let revoked = [
            ("UPDATE", "passage"),
            ("DELETE", "unrouted"),
            ("DELETE", "sleeper"),
            ("SELECT", "outbox"),
            ("UPDATE", "lane"),
        ];
        for (right, table) in revoked {
            owner.batch_execute(&format!("REVOKE {right} ON postbox.{table} FROM {relay}")).await.expect("revoked");
            let error = relaying.check_relay_rights(&[LogName::outbox()]).await.expect_err(table);
            assert!(error.message().contains(&format!("lacks {right} on \"postbox\".")), "{error}");
            assert!(error.message().contains(table), "{error}");
            owner.batch_execute(&grants).await.expect("granted again");
        }

        // A reader sees, and changes nothing.
        let looking = store(&reader).await;
        use postbox_core::{
            Admin as _, Diagnose as _, Inspect as _, Maintain as _, Migrate as _, Store as _, SubscriptionName,
            Tail as _,
        };
        looking.validate().await.expect("valid");
        let name = SubscriptionName::new("reader").expect("a name");
        assert_eq!(looking.subscriptions().await.expect("listed").len(), 2);
        looking.stats(&name).await.expect("counted");
        looking.conflicts(1).await.expect("listed");
        looking.arrivals(&LogName::outbox(), 1).await.expect("looked");
        looking.blockers().await.expect("looked");
        looking.check_integrity().await.expect("they fit");
        let (all, log) = (Selection { dry_run: true, ..Selection::default() }, LogName::outbox());
        let (replay, prune) =
            (Replay { dry_run: true, ..Replay::default() }, Prune { dry_run: true, ..Prune::default() });
        for counted in [
            looking.change(&name, &Change::Retry, &all).await.map(drop),
            looking.change(&name, &Change::Discard, &all).await.map(drop),
            looking.change(&name, &Change::MarkDead { why: None }, &all).await.map(drop),
            looking.replay(&name, &replay).await.map(drop),
            looking.prune(&log, &prune).await.map(drop),
        ] {
            counted.expect("counted");
        }
        let limit = BatchLimit { events: 1, payload_bytes: 1 };
        looking.tail(&log, &Criteria::default(), None, limit).await.expect("begun");
        let refused = looking.pause(&name, None).await.expect_err("refused");
        assert_eq!(refused.code(), "permission_denied");
        let reading = support::client(&url_as(&fixture.url, &reader)).await;
        for view in ["stats", "outbox_state", "outbox_dead", "inbox_state", "inbox_dead"] {
            reading.query(&format!("SELECT * FROM postbox.{view}"), &[]).await.expect(view);
            let refused = client.query(&format!("SELECT * FROM postbox.{view}"), &[]).await.expect_err(view);
            assert_eq!(refused.code().map(|state| state.code()), Some("42501"), "{view}");
        }
        // Neither of them can make the store do for them what they may not do themselves.
        for sql in [
            "postbox.retry('reader', gen_random_uuid())",
            "postbox.discard('reader', (SELECT gen_random_uuid()))",
            "postbox.mark_dead('reader', 'why', gen_random_uuid())",
            "postbox.pause('reader', 'why')",
            "postbox.resume('reader')",
            "postbox.once('a', 'm')",
            "postbox.receive('a', 'm', 't', '{}')",
            "postbox.lock_lanes(1)",
        ] {
            for role in [&client, &reading] {
                let refused = role.batch_execute(&format!("SELECT {sql}")).await.expect_err(sql);
                assert_eq!(refused.code().map(|state| state.code()), Some("42501"), "{sql}");
            }
        }
        let has = "SELECT postbox.outbox_has(gen_random_uuid(), 't', NULL, NULL, '1', NULL)";
        client.batch_execute(has).await.expect("a writer may ask");
        let refused = reading.batch_execute(has).await.expect_err("whoever does not append, may not");
        assert_eq!(refused.code().map(|state| state.code()), Some("42501"));
        let refused = client.batch_execute(&has.replace("outbox", "inbox")).await.expect_err("not of every log");
        assert_eq!(refused.code().map(|state| state.code()), Some("42501"));
        // A consumer's role needs one right.
        let once = format!(
            "REVOKE ALL ON ALL TABLES IN SCHEMA postbox FROM {reader}; GRANT INSERT ON postbox.once TO {reader}"
        );
        owner.batch_execute(&once).await.expect("granted");
        reading.batch_execute("SELECT postbox.once('a', 'm')").await.expect("asked");
        // A writer reads no event and no cursor, and cannot set the store's own columns.
        for sql in [
            "SELECT FROM postbox.outbox",
            "SELECT FROM postbox.lane",
            "DELETE FROM postbox.outbox",
            "INSERT INTO postbox.outbox (topic, payload, xid) VALUES ('t', '', '3')",
            "INSERT INTO postbox.outbox (topic, payload, created_at) VALUES ('t', '', now())",
            "INSERT INTO postbox.inbox (topic, payload) VALUES ('t', '')",
        ] {
            let refused = client.batch_execute(sql).await.expect_err(sql);
            assert_eq!(refused.code().map(|state| state.code()), Some("42501"), "{sql}");
        }
        for role in [&writer, &relay, &reader] {
            owner.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.expect("cleaned up");
        }
    }
}
