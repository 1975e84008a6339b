//! Tests of the query plans of our statements. Every case here was once wrong: a scan of the whole
//! table instead of an index, 3 to 250 times slower.
//!
//! Each case runs before and after the log's first ANALYZE, because the planner goes wrong
//! differently without statistics.

use std::time::Duration;

use crate::admin::CLEAR_FOLLOWER_DUE;
use crate::apply::{APPLY_BEGIN, SETTINGS_OURS};
use crate::dead_letters::LETTERS_WRITE;
use crate::due::DELIVERY_READ_DUE;
use crate::prune::prune;
use crate::session::Session;
use crate::settle::{DELIVERY_COUNT, DELIVERY_DELETE, DELIVERY_RELEASE, DELIVERY_UPDATE};
use crate::subscription::look_up;
use crate::walk::walk;
use crate::window::KEYS_HELD;
use crate::{PostgresConfig, PostgresStore, SchemaName};
use postbox_core::kit::{LOOK_EVENTS_MAX, PRUNE_ROWS_MAX};
use postbox_core::{
    Criteria, Headers, Key, ListQuery, Log as _, LogName, Migrate as _, Prune, State, Subscription, SubscriptionName,
};
use postbox_postgres_sql::{Param, params};
use postbox_testkit::servers::{Postgres, Version};

/// Rows in the log. Enough that a full scan costs more than any index scan.
const ROWS: u32 = 100_000;

/// Retention reads each event once in a run, however many have to stay, and stops at the first
/// young events. What it reads per event does not grow with the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retention_reads_each_event_once() {
    for version in Version::ALL {
        for stay in [20_000, 60_000] {
            let store = filled(
                version,
                &format!(
                    "INSERT INTO postbox.outbox (topic, key, payload, created_at)
                     SELECT 'topic', 'k' || n % 1000, 'x', now() - CASE WHEN n <= {stay} + 15000 THEN interval '1 day' ELSE interval '0' END"
                ),
            )
            .await;
            let session = store.session("test").await.expect("a session");
            // All events are passed. The first are dead and stay, the next are discarded, the last
            // are young.
            let pass = format!(
                "ALTER TABLE postbox.delivery SET (autovacuum_enabled = false);
                 INSERT INTO postbox.subscription (name, log, topics, ordering, lanes) VALUES ('s', 'outbox', '{{}}', 'key', 2);
                 INSERT INTO postbox.lane (subscription, lane, from_snap, to_snap, low, high, last_seq)
                 SELECT s.id, n, pg_current_snapshot(), pg_current_snapshot(), 0, 0, 0 FROM postbox.subscription AS s, generate_series(0, 1) AS n;
                 INSERT INTO postbox.delivery (subscription, lane, seq, key, state, ordered)
                 SELECT s.id, 0, l.seq, l.key, CASE WHEN l.seq <= {stay} THEN 'dead' ELSE 'discarded' END, true
                 FROM postbox.outbox AS l, postbox.subscription AS s WHERE l.seq <= {stay} + 1000"
            );
            session.client().batch_execute(&pass).await.expect("passed");
            session.begin(&store.inner.modes.prune).await.expect("begun");
            let before = rows_read(&session).await;
            let (mut deleted, mut steps, mut after) = (0, 0, None);
            loop {
                let wanted = Prune { older_than: Duration::from_secs(3_600), after, ..Prune::default() };
                let step = prune(&session, &LogName::outbox(), &wanted).await.expect("pruned");
                (deleted, steps) = (deleted + step.count, steps + 1);
                after = step.next;
                if after.is_none() {
                    break;
                }
            }
            let [events, rows] = rows_read_since(&session, before).await;
            session.commit().await.expect("ended");
            let context = format!("(Postgres {}, {stay} stay, {steps} steps)", version.number());
            assert_eq!(deleted, 15_000, "{context}");
            let looked = stay + 15_000 + PRUNE_ROWS_MAX as i64;
            // Three reads of each event: to find the end of the step, to delete, and to find young
            // events.
            assert!(events <= 3 * looked, "{events} events read {context}");
            assert!(rows <= 2 * (stay + 1_000) + looked, "{rows} delivery rows read {context}");
            let left = session.row("SELECT count(*) FROM postbox.delivery", &[]).await.expect("counted");
            assert_eq!(left.get::<_, i64>(0), stay, "a discarded event's row goes with it {context}");
        }
    }
}

/// A metrics scrape costs the same however many events the log holds, unread or dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_look_at_a_bounded_number_of_rows() {
    const LOOK: i64 = LOOK_EVENTS_MAX as i64 + 1;
    const SAMPLE: i64 = 64 * 32;
    for version in Version::ALL {
        let store = filled(
            version,
            "INSERT INTO postbox.outbox (topic, key, payload) SELECT CASE n % 1000 WHEN 0 THEN 'rare' ELSE 'topic' END, 'k' || n % 1000, 'x'",
        )
        .await;
        let session = store.session("test").await.expect("a session");
        let fill = "ALTER TABLE postbox.delivery SET (autovacuum_enabled = false);
             INSERT INTO postbox.subscription (name, log, topics, ordering, lanes) VALUES ('s', 'outbox', '{}', 'key', 2);
             INSERT INTO postbox.lane (subscription, lane, from_snap, to_snap, low, high, last_seq)
             SELECT s.id, n, '3:3:', '3:3:', 0, 0, 0 FROM postbox.subscription AS s, generate_series(0, 1) AS n;
             INSERT INTO postbox.delivery (subscription, lane, seq, state, ordered)
             SELECT s.id, 0, l.seq, CASE l.seq % 2 WHEN 0 THEN 'dead' ELSE 'retrying' END, true
             FROM postbox.outbox AS l, postbox.subscription AS s WHERE l.seq <= 40000";
        session.client().batch_execute(fill).await.expect("filled");
        // If all rows have one state, statistics make any index look good for the other states.
        for analysed in [
            "",
            "ANALYZE postbox.outbox; ANALYZE postbox.delivery",
            "UPDATE postbox.delivery SET state = 'dead'; ANALYZE postbox.delivery",
        ] {
            const RARE: u32 = ROWS / 1000;
            session.client().batch_execute(analysed).await.expect("analysed");
            for (stands, from, to, last, topics, pending, skipped) in [
                ("all read", "pg_current_snapshot()", "pg_current_snapshot()", 0, "{}", 0, 0),
                ("nothing read", "'3:3:'", "'3:3:'", 0, "{}", ROWS, 0),
                ("half of the first window", "'1:1:'", "pg_current_snapshot()", 50_000, "{}", 50_000, 0),
                ("the end of the first window", "'1:1:'", "pg_current_snapshot()", 95_000, "{}", 5_000, 0),
                ("nothing of a rare topic", "'3:3:'", "'3:3:'", 0, "{rare}", RARE, 0),
                ("all of a rare topic", "pg_current_snapshot()", "pg_current_snapshot()", 0, "{rare}", 0, 60_000),
            ] {
                let set = format!(
                    "UPDATE postbox.lane SET from_snap = {from}, to_snap = {to}, last_seq = {last}, high = CASE WHEN {last} > 0 THEN 9223372036854775807 ELSE 0 END;
                     UPDATE postbox.subscription SET topics = '{topics}'"
                );
                session.client().batch_execute(&set).await.expect("set");
                session.begin(&store.inner.modes.count).await.expect("begun");
                let before = rows_read(&session).await;
                let call = format!(
                    "SELECT coalesce(sum(events) FILTER (WHERE state = 'pending'), 0)::bigint,
                       coalesce(bool_or(is_estimate) FILTER (WHERE state = 'pending'), false),
                       coalesce(sum(events) FILTER (WHERE state = 'skipped'), 0)::bigint
                     FROM postbox.depths(ARRAY['s'], {LOOK})"
                );
                let counted = session.row(&call, &[]).await.expect("counted");
                let [events, rows] = rows_read_since(&session, before).await;
                session.commit().await.expect("ended");
                let (found, is_estimate, passed_over): (i64, bool, i64) =
                    (counted.get(0), counted.get(1), counted.get(2));
                let context = format!(
                    "{stands} (Postgres {}, analysed: {analysed}): {found}, {passed_over} skipped, {events} events and {rows} rows read",
                    version.number()
                );
                assert_eq!(is_estimate, pending > 10_000 || pending == RARE, "{context}");
                let within = if pending != RARE {
                    0.1 * f64::from(pending) * f64::from(u8::from(is_estimate))
                } else {
                    f64::from(ROWS)
                };
                assert!((found as f64 - f64::from(pending)).abs() <= within, "{context}");
                assert!((passed_over - skipped).abs() <= skipped / 10, "{context}");
                // Unread events, waiting rows, the samples, and the probes at their edges.
                assert!(events <= 2 * LOOK + SAMPLE + 100, "{context}");
                assert!(rows <= 3 * LOOK + SAMPLE, "{context}");
            }
            session.begin(&store.inner.modes.count).await.expect("begun");
            let before = rows_read(&session).await;
            let newest = session.log_sql(crate::diagnose::LOG_NEWEST, &LogName::outbox());
            assert_eq!(session.rows(&newest, &params![100_i64]).await.expect("looked").len(), 100);
            assert!(rows_read_since(&session, before).await[0] <= 100, "the newest, analysed: {analysed}");
            session.commit().await.expect("ended");
        }
    }
}

/// The number of rows of the log and of its delivery rows read since `before`.
async fn rows_read_since(session: &Session, before: [i64; 2]) -> [i64; 2] {
    let now = rows_read(session).await;
    [now[0] - before[0], now[1] - before[1]]
}

/// The number read since the server last flushed its statistics, earlier transactions included.
async fn rows_read(session: &Session) -> [i64; 2] {
    let reads = "SELECT (seq_tup_read + idx_tup_fetch)::bigint FROM pg_stat_xact_user_tables
                 WHERE schemaname = 'postbox' AND relname IN ('outbox', 'delivery') ORDER BY relname DESC";
    let reads = session.rows(reads, &[]).await.expect("counted");
    [0, 1].map(|at| reads[at].get(0))
}

/// A list of what is pending reads nothing that all lanes have passed, but finds a row of a
/// transaction that committed late. A list that walks the log misses nothing between two steps.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_of_what_is_pending_skips_what_was_passed() {
    const LATE: u32 = 90_000;
    for version in Version::ALL {
        let fill = format!(
            "INSERT INTO postbox.outbox (xid, topic, key, payload)
             SELECT (CASE n WHEN {LATE} THEN '300' ELSE '101' END)::xid8, 'topic', 'k' || n % 1000, 'x'"
        );
        let store = filled(version, &fill).await;
        let name = SubscriptionName::new("s").expect("a name");
        let subscription = Subscription { lanes: Some(2), ..Subscription::new(name.clone(), LogName::outbox()) };
        store.subscribe(&subscription).await.expect("subscribed");
        let session = store.session("test").await.expect("a session");
        let row = look_up(&session, &name).await.expect("a subscription");
        let list = async |state, key: Option<&str>| {
            let which = Criteria { key: key.map(|key| Key::new(key).expect("a key")), ..Criteria::default() };
            let (code, headers, after) = (None, Headers::new(), None);
            let (subscription, limit, payloads) = (name.clone(), 500, true);
            let query = ListQuery { subscription, state: Some(state), which, code, headers, after, limit, payloads };
            session.begin(&store.inner.modes.dry_run).await.expect("begun");
            let before = rows_read(&session).await;
            let found = walk(&session, &row, (&query, state), 0).await.expect("listed").len();
            let [events, _] = rows_read_since(&session, before).await;
            session.commit().await.expect("ended");
            (found, events)
        };
        for (stands, pending) in [("pg_current_snapshot()", 0_usize), ("'50:400:50'", 0), ("'300:400:300'", 1)] {
            let set = format!("UPDATE postbox.lane SET from_snap = {stands}, to_snap = {stands}");
            session.client().batch_execute(&set).await.expect("set");
            let (found, events) = list(State::Pending, None).await;
            let context = format!("{events} events read (Postgres {}, {stands})", version.number());
            assert_eq!(found, pending, "{context}");
            // The first step, and what follows the late row, each to find its end and to judge it.
            assert!(events <= 2 * 1_100 + pending as i64 * 2 * 10_100, "{context}");
            assert_eq!(list(State::Dispatched, Some("k999")).await.0, 100, "{context}");
        }
    }
}

/// An operator retries many dead events. Statistics taken before know of no row that holds its key.
/// Comparing all such rows with each of the keys took seconds a step, under the lanes' locks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_of_many_finds_its_rows_by_key_and_place() {
    for version in Version::ALL {
        let store =
            filled(version, "INSERT INTO postbox.outbox (topic, key, payload) SELECT 'topic', 'k' || n % 1000, 'x'")
                .await;
        let session = store.session("test").await.expect("a session");
        let client = session.client();
        let fill = "ALTER TABLE postbox.delivery SET (autovacuum_enabled = false);
             INSERT INTO postbox.subscription (name, log, topics, ordering, lanes) VALUES ('s', 'outbox', '{}', 'key', 1);
             INSERT INTO postbox.delivery (subscription, lane, seq, key, state, ordered)
             SELECT s.id, 0, l.seq, l.key, 'dead', true FROM postbox.outbox AS l, postbox.subscription AS s";
        client.batch_execute(fill).await.expect("filled");
        for analysed in [false, true] {
            if analysed {
                client.batch_execute("ANALYZE postbox.outbox; ANALYZE postbox.delivery").await.expect("analysed");
            }
            client.batch_execute(&store.inner.modes.write).await.expect("begun");
            let keys: Vec<String> = (0..1000).map(|n| format!("\"k{n}\"")).collect();
            let clear = SchemaName::default().sql(CLEAR_FOLLOWER_DUE).replace("$1", "1");
            let clear = clear.replace("$2::text[]", &format!("'{{{}}}'::text[]", keys.join(",")));
            let rows = client.query_typed(&format!("EXPLAIN {clear}"), &[]).await.expect("explained");
            let plan: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
            let plan = plan.join("\n");
            let context = format!("(Postgres {}, analysed: {analysed})\n{plan}", version.number());
            let by_key = ["delivery_held ", "(key = touched.key)"];
            assert!(by_key.iter().all(|look| plan.matches(look).count() == 2), "not twice {by_key:?} {context}");
            let wrong = [" delivery_due ", " delivery_state ", "Seq Scan", "Sort"];
            assert!(!wrong.iter().any(|wrong| plan.contains(wrong)), "{context}");
            // A step reads up to its end and no further, then writes by `seq`. The last call names
            // the most ids that an operator can name.
            let ids = "ARRAY(SELECT id FROM postbox.outbox WHERE seq % 100 = 0 LIMIT 1000)";
            for call in [
                "'retry', 's', NULL, topic_like => 't%'".to_owned(),
                "'discard', 's', NULL".to_owned(),
                "'retry', 's', NULL, is_dry => true".to_owned(),
                format!("'retry', 's', {ids}"),
            ] {
                client.batch_execute("SAVEPOINT before").await.expect("saved");
                if call.ends_with(ids) {
                    client
                        .batch_execute(&format!("CREATE TEMPORARY TABLE named ON COMMIT DROP AS SELECT {ids} AS ids"))
                        .await
                        .expect("named");
                }
                let before = rows_read(&session).await;
                let sql =
                    format!("SELECT changed FROM postbox.change({})", call.replace(ids, "(SELECT ids FROM named)"));
                assert_eq!(session.row(&sql, &[]).await.expect("changed").get::<_, i64>(0), 1000, "{sql}");
                let [events, rows] = rows_read_since(&session, before).await;
                client.batch_execute("ROLLBACK TO before").await.expect("undone");
                let context = format!(
                    "{events} events and {rows} rows read by {sql} (Postgres {}, analysed: {analysed})",
                    version.number()
                );
                assert!(events <= 2_000 && rows <= 10_000, "{context}");
            }
            client.batch_execute("ROLLBACK").await.expect("ended");
        }
    }
}

/// The table of delivery rows is nearly empty most of the time. Its statistics still say so when a
/// destination suddenly refuses everything. A settlement must read only its own rows even then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_reads_its_own_rows_whatever_the_statistics_say() {
    const SETTLED: i64 = 500;
    for version in Version::ALL {
        let store = filled(version, "INSERT INTO postbox.outbox (topic, payload) SELECT 'topic', 'x'").await;
        let session = store.session("test").await.expect("a session");
        let fill = "ALTER TABLE postbox.delivery SET (autovacuum_enabled = false);
             INSERT INTO postbox.subscription (name, log, topics, ordering, lanes)
             SELECT name, 'outbox', '{}', 'key', 1 FROM unnest('{few, many}'::text[]) AS s(name);
             INSERT INTO postbox.delivery (subscription, lane, seq, key, state, ordered)
             SELECT s.id, 0, n, 'k' || n, 'dead', true FROM generate_series(1, 20) AS n, postbox.subscription AS s WHERE s.name = 'few';
             ANALYZE postbox.delivery;
             INSERT INTO postbox.delivery (subscription, lane, seq, key, state, ordered, due_at, attempts)
             SELECT s.id, 0, n, 'k' || n % 5000, CASE WHEN n <= 5000 THEN 'retrying' ELSE 'blocked' END, true,
               CASE WHEN n <= 5000 THEN now() END, 1
             FROM generate_series(1, 30000) AS n, postbox.subscription AS s WHERE s.name = 'many'";
        session.client().batch_execute(fill).await.expect("filled");
        let many: i32 =
            session.row("SELECT id FROM postbox.subscription WHERE name = 'many'", &[]).await.expect("it").get(0);
        let seqs: Vec<i64> = (1..=SETTLED).collect();
        let keys: Vec<String> = seqs.iter().map(|seq| format!("k{seq}")).collect();
        let (befores, replays) = (vec![1; seqs.len()], vec![0; seqs.len()]);
        let (states, halts, attempts) = (vec!["retrying"; seqs.len()], vec![false; seqs.len()], vec![2; seqs.len()]);
        let (codes, waits) = (vec![Some("http_500"); seqs.len()], vec![Some(1_i64); seqs.len()]);
        let (errors, ats): (Vec<Option<&str>>, Vec<Option<jiff::Timestamp>>) = (codes.clone(), vec![None; seqs.len()]);
        let (lane, ordered) = (0_i16, true);
        let place = "(0,1)";
        let tooks = waits.clone();
        let update = params![
            many, lane, ordered, seqs, keys, states, halts, attempts, codes, errors, waits, ats, befores, replays,
            tooks
        ];
        let delete = params![many, seqs, befores, replays, lane, place];
        let (count, release) = (params![many, seqs, befores, replays, seqs], params![many, keys]);
        let letters = params![many, lane, seqs, replays, waits];
        let (inline, most, lane_number) = (1024, SETTLED + 1, 0);
        let due = params![inline, most, lane_number, many];
        let modes = &store.inner.modes;
        let apply = format!("BEGIN; {}; {}", *APPLY_BEGIN, *SETTINGS_OURS);
        let calls: [(&str, &str, &[Param<'_>]); 11] = [
            (DELIVERY_UPDATE, &modes.write, &update),
            (DELIVERY_UPDATE, &apply, &update),
            (DELIVERY_DELETE, &modes.write, &delete),
            (DELIVERY_DELETE, &apply, &delete),
            (DELIVERY_COUNT, &apply, &count),
            (DELIVERY_RELEASE, &modes.write, &release),
            (DELIVERY_RELEASE, &apply, &release),
            (CLEAR_FOLLOWER_DUE, &modes.write, &release),
            (LETTERS_WRITE, &modes.write, &letters),
            (DELIVERY_READ_DUE, &modes.read, &due),
            (KEYS_HELD, "BEGIN", &release),
        ];
        for (template, mode, params) in calls {
            session.begin(mode).await.expect("begun");
            let before = rows_read(&session).await;
            let sql = session.log_sql(template, &LogName::outbox());
            session.rows(&sql, params).await.expect("executed");
            let [_, rows] = rows_read_since(&session, before).await;
            session.client().batch_execute("ROLLBACK").await.expect("ended");
            let context = format!("{rows} rows read (Postgres {}) by {sql}", version.number());
            assert!((1..=10 * SETTLED).contains(&rows), "{context}");
        }
    }
}

/// Returns a store whose outbox has a row for each `n` up to [`ROWS`]. Autovacuum is off, so that
/// only the test analyses it.
pub(crate) async fn filled(version: Version, insert: &str) -> PostgresStore {
    let url = Postgres::shared(version).await.fresh_database().await;
    let store = PostgresStore::connect(PostgresConfig::new(&url)).await.expect("a store");
    store.up().await.expect("migrated");
    let session = store.session("test").await.expect("a session");
    let fill = format!(
        "ALTER TABLE postbox.outbox SET (autovacuum_enabled = false), DROP CONSTRAINT event_invalid; {insert} FROM generate_series(1, {ROWS}) AS n"
    );
    session.client().batch_execute(&fill).await.expect("filled");
    store
}

fn judge(plan: &str, indexes: &[&str], rows_max: u64, context: &str) {
    assert!(!plan.contains("Seq Scan on outbox"), "{context}");
    assert!(!plan.contains("Hash Join") && !plan.contains("Merge Join"), "{context}");
    // Not through the primary key, which leads past every old row version while anyone holds a
    // snapshot.
    assert!(!plan.contains("lane_pkey") && plan.contains("Tid Scan on lane"), "{context}");
    for index in indexes {
        assert!(plan.contains(&format!(" {index} ")), "not through {index}: {context}");
    }
    let touched = rows_touched(plan);
    assert!(touched <= rows_max, "{touched} rows touched: {context}");
}

/// A lane in a log of 100,000 rows: 166 rows of each of the transaction ids 101 to 600, the others
/// of id 650.
struct LaneCase {
    name: &'static str,
    /// `from_snap`, `to_snap`, `low` and `high`.
    window: (&'static str, &'static str, i64, i64),
    /// The call, for the lane whose row is at `$place`.
    call: &'static str,
    indexes: &'static [&'static str],
    rows_max: u64,
}

/// Calls the window function: most rows, lane, lanes, topics and tenant; then where the lane
/// stands; then the place to continue after, and how many places to look at. It stays in no window.
macro_rules! window {
    ($lanes:literal, $topics:literal, $to:literal, $after:literal) => {
        window!($lanes, $topics, $to, $after, "10000")
    };
    ($lanes:literal, $topics:literal, $to:literal, $after:literal, $look:literal) => {
        concat!(
            "SELECT count(*) FROM postbox.outbox_window(16384, 501, 0, ",
            $lanes,
            ", ",
            $topics,
            ", NULL, NULL, NULL, NULL, $id, 1, 1, '$place', '",
            $to,
            "', 0, ",
            $after,
            ", ",
            $look,
            ", false, NULL, NULL)"
        )
    };
}

const LANE_CASES: [LaneCase; 11] = [
    LaneCase {
        name: "no news",
        window: ("1:1:", "651:651:", 0, 0),
        call: window!("1", "NULL", "651:651:", "NULL"),
        indexes: &["outbox_xid_seq"],
        rows_max: 10,
    },
    LaneCase {
        name: "stragglers, and nothing else",
        window: ("1:1:", "599:651:599,600", 0, 0),
        call: window!("1", "NULL", "599:651:599,600", "NULL"),
        indexes: &["outbox_xid_seq"],
        rows_max: 1_200,
    },
    LaneCase {
        name: "a first page of one large transaction",
        window: ("1:1:", "601:601:", 0, 0),
        call: window!("1", "NULL", "601:601:", "NULL"),
        indexes: &["outbox_xid_seq", "outbox_pkey"],
        // The bounds read each of the window's 16,666 rows once, in the index. Then the page passes
        // five rows for each of its own.
        rows_max: 20_000,
    },
    LaneCase {
        name: "the first window of all",
        window: ("1:1:", "1:1:", 0, 0),
        call: window!("1", "NULL", "1:1:", "NULL"),
        indexes: &["outbox_pkey"],
        rows_max: 600,
    },
    LaneCase {
        name: "a page in the middle of the first window",
        window: ("1:1:", "700:700:", 0, i64::MAX),
        call: window!("1", "NULL", "700:700:", "50000"),
        indexes: &["outbox_pkey"],
        rows_max: 600,
    },
    LaneCase {
        name: "a page with a topic filter and lanes",
        window: ("1:1:", "700:700:", 0, i64::MAX),
        call: window!("4", "'{t%}'", "700:700:", "50000"),
        indexes: &["outbox_pkey"],
        rows_max: 2_300,
    },
    LaneCase {
        name: "a page of stragglers",
        window: ("300:651:300,400", "700:700:", 0, 0),
        call: window!("1", "NULL", "700:700:", "50000"),
        indexes: &["outbox_xid_seq"],
        rows_max: 400,
    },
    LaneCase {
        name: "a page of a topic that no event has",
        window: ("1:1:", "700:700:", 0, i64::MAX),
        call: window!("1", "'{rare}'", "700:700:", "50000"),
        indexes: &["outbox_pkey"],
        rows_max: 10_010,
    },
    LaneCase {
        name: "stragglers of a topic that no event has",
        window: ("601:651:650", "700:700:", 0, 0),
        call: window!("1", "'{rare}'", "700:700:", "50000"),
        indexes: &["outbox_xid_seq"],
        // A sixth of the places that are looked at.
        rows_max: 2_000,
    },
    LaneCase {
        name: "a window of more rows than its bounds are looked for in",
        window: ("1:1:", "102:102:", 0, 0),
        call: window!("1", "'{rare}'", "102:102:", "NULL", "500"),
        indexes: &["outbox_xid_seq", "outbox_pkey"],
        // Of its 99,834 rows, the bounds read as many as a hundred calls look at, and the walk
        // those of one.
        rows_max: 51_000,
    },
    LaneCase {
        name: "a settled position",
        window: ("1:1:", "700:700:", 0, i64::MAX),
        call: "SELECT verdict FROM postbox.settle_lane($id, 0, 1, '$place', '700:700:', 1, 0, 5, 5)",
        indexes: &[],
        rows_max: 0,
    },
];

/// Statements inside functions are planned once for all parameters, so their plans are observed
/// while the functions run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_read_of_a_lane_walks_the_log() {
    for version in Version::ALL {
        let url = Postgres::shared(version).await.fresh_database().await;
        let store = PostgresStore::connect(PostgresConfig::new(&url)).await.expect("a store");
        store.up().await.expect("migrated");
        let (client, mut connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.expect("connected");
        let (noted, mut notices) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
                if let tokio_postgres::AsyncMessage::Notice(notice) = message {
                    let _ = noted.send(notice.message().to_owned());
                }
            }
        });
        let fill = format!(
            "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on;
             SET auto_explain.log_analyze = on; SET auto_explain.log_timing = off; SET auto_explain.log_level = notice;
             ALTER TABLE postbox.outbox SET (autovacuum_enabled = false), DROP CONSTRAINT event_invalid;
             INSERT INTO postbox.outbox (xid, topic, key, payload)
             SELECT (CASE WHEN n % 6 = 0 THEN 650 ELSE 101 + n % 500 END)::text::xid8, 'topic', 'k' || n % 1000, repeat('x', 100)
             FROM generate_series(1, {ROWS}) AS n;
             INSERT INTO postbox.subscription (name, log, topics, ordering, lanes) VALUES ('s', 'outbox', '{{}}', 'key', 1);
             INSERT INTO postbox.lane (subscription, lane, from_snap, to_snap, low, high, last_seq, epoch)
             SELECT id, 0, '1:1:', '1:1:', 0, 0, 0, 1 FROM postbox.subscription"
        );
        client.batch_execute(&fill).await.expect("filled");
        for analysed in [false, true] {
            if analysed {
                client.batch_execute("ANALYZE postbox.outbox").await.expect("analysed");
            }
            for case in &LANE_CASES {
                let (from, to, low, high) = case.window;
                let lanes = if case.name.ends_with("and lanes") { 4 } else { 1 };
                let lanes = format!("UPDATE postbox.subscription SET lanes = {lanes}");
                client.batch_execute(&lanes).await.expect("set");
                let set = format!(
                    "UPDATE postbox.lane SET from_snap = '{from}', to_snap = '{to}', low = {low}, high = {high}, last_seq = 0,
                       lease_until = clock_timestamp() + interval '1 hour' RETURNING ctid::text, subscription::text"
                );
                let row = client.query_one(&set, &[]).await.expect("set");
                let call = case.call.replace("$place", row.get(0)).replace("$id", row.get(1));
                while notices.try_recv().is_ok() {}
                client.query_one(&call, &[]).await.expect("called");
                let mut plan = String::new();
                while let Ok(notice) = notices.try_recv() {
                    plan.push_str(&notice);
                    plan.push('\n');
                }
                let context = format!("{} (Postgres {}, analysed: {analysed})\n{plan}", case.name, version.number());
                judge(&plan, case.indexes, case.rows_max, &context);
            }
        }
        client.batch_execute("SELECT 1").await.expect("alive");
    }
}

/// The number of rows that scans of the log returned or removed.
fn rows_touched(plan: &str) -> u64 {
    let mut touched = 0.0;
    let mut in_log = false;
    for line in plan.lines() {
        if line.contains("actual rows=") || line.contains("never executed") {
            in_log = line.contains(" on outbox ");
        }
        let number = |after: &str| -> f64 {
            let rest = line.split(after).nth(1).unwrap_or_default();
            let digits: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
            digits.parse().unwrap_or_default()
        };
        if in_log && line.contains("actual rows=") {
            touched += number("actual rows=") * number("loops=");
        }
        if in_log && line.contains("Rows Removed by") {
            touched += number(": ");
        }
    }
    touched as u64
}
