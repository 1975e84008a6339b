//! What the planner makes of our statements. Each trap here was hit: a walk of the whole table instead of an index, 3 to 250 times slower.
//!
//! The log is asked twice, before and after its first ANALYZE, because the planner errs differently without statistics.

use tokio_postgres::Client;

use super::page::{LOG_READ_REST, LOG_READ_REST_FIRST, LOG_READ_STRAGGLERS, PAGE_GUARD};
use super::settle::LANE_SETTLE;
use super::window::LANE_PEEK;
use crate::{PostgresConfig, PostgresStore, SchemaName};
use postbox_core::{LogName, Migrate as _};
use postbox_testkit::servers::{Postgres, Version};

/// Rows in the log. Large enough that a walk costs more than any index.
const ROWS: u32 = 100_000;

struct Case {
    name: &'static str,
    sql: &'static str,
    /// The parameters, as SQL: `EXPLAIN` takes none.
    params: &'static [&'static str],
    /// The indexes the plan must use.
    indexes: &'static [&'static str],
    /// Where the lane's row is known to be.
    place: &'static str,
    /// Whether it runs with the planner pinned.
    pinned: bool,
    /// Rows of the log it may look at: what it returns, and a few.
    rows_max: u64,
}

/// `$1` to `$6` of every read: inline bytes, rows, lane, lanes, topics, tenant.
macro_rules! shared {
    ($($more:literal),*) => { &["16384::int", "501::bigint", "0::int", "1::int", "NULL::text[]", "NULL::text", $($more),*] };
}

/// Every row has a transaction of its own: its id is the row's number + 1000.
const CASES: [Case; 8] = [
    Case {
        name: "a page in the middle of the first window",
        sql: LOG_READ_REST,
        params: shared!("50000::bigint", "9223372036854775807::bigint", "'1'::xid8", "'200000:200000:'::pg_snapshot"),
        indexes: &["outbox_pkey"],
        place: "ctid = '(0,1)' AND",
        pinned: true,
        rows_max: 600,
    },
    Case {
        name: "the first page of a small window at the end of a long log",
        sql: LOG_READ_REST_FIRST,
        params: shared!(
            "'{100899}'::xid8[]",
            "'{200000}'::xid8[]",
            "'100900'::xid8",
            "'200000:200000:'::pg_snapshot",
            "100000::bigint"
        ),
        indexes: &["outbox_xid_seq", "outbox_pkey"],
        place: "ctid = '(0,1)' AND",
        pinned: true,
        rows_max: 600,
    },
    Case {
        name: "the stragglers of a window",
        sql: LOG_READ_STRAGGLERS,
        params: shared!("0::bigint", "'{5000,60000,90000}'::xid8[]"),
        indexes: &["outbox_xid_seq"],
        place: "ctid = '(0,1)' AND",
        pinned: true,
        rows_max: 50,
    },
    Case {
        name: "the look for news when there are none",
        sql: LANE_PEEK,
        params: &["1::int", "0::smallint", "1::bigint", "'4000000000'::xid8", "'{}'::xid8[]", "'1:1:'", "0::bigint"],
        indexes: &["outbox_xid_seq"],
        place: "ctid = '(0,1)' AND",
        pinned: false,
        rows_max: 10,
    },
    Case {
        name: "the look for news when there are many",
        sql: LANE_PEEK,
        params: &[
            "1::int",
            "0::smallint",
            "1::bigint",
            "'50000'::xid8",
            "'{7,8,9,2000}'::xid8[]",
            "'1:1:'",
            "0::bigint",
        ],
        indexes: &["outbox_xid_seq"],
        place: "ctid = '(0,1)' AND",
        pinned: false,
        rows_max: 10,
    },
    Case {
        name: "a settled position, while somebody holds a snapshot: not by key, past every old version",
        sql: LANE_SETTLE,
        params: &["1::int", "0::smallint", "1::bigint", "5::bigint"],
        indexes: &[],
        place: "ctid = '(0,1)' AND",
        pinned: true,
        rows_max: 0,
    },
    Case {
        name: "the guard of a page, likewise",
        sql: PAGE_GUARD,
        params: &["1::int", "0::smallint", "1::bigint"],
        indexes: &[],
        place: "ctid = '(0,1)' AND",
        pinned: true,
        rows_max: 0,
    },
    Case {
        name: "a page with a topic filter and lanes",
        sql: LOG_READ_REST,
        params: &[
            "16384::int",
            "101::bigint",
            "1::int",
            "4::int",
            "'{t%}'::text[]",
            "NULL::text",
            "50000::bigint",
            "9223372036854775807::bigint",
            "'1'::xid8",
            "'200000:200000:'::pg_snapshot",
        ],
        indexes: &["outbox_pkey"],
        place: "ctid = '(0,1)' AND",
        pinned: true,
        rows_max: 2_000,
    },
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_walks_the_log() {
    for version in Version::ALL {
        let url = Postgres::shared(version).await.fresh_database().await;
        let store = PostgresStore::connect(PostgresConfig::new(&url)).await.expect("a store");
        store.up().await.expect("migrated");
        let session = store.session("test").await.expect("a session");
        let client = session.client();
        // Nobody else may analyse it meanwhile; and the ids are ours to choose.
        let fill = format!(
            "ALTER TABLE postbox.outbox SET (autovacuum_enabled = false);
             INSERT INTO postbox.outbox (xid, topic, key, payload)
             SELECT (n + 1000)::text::xid8, 'topic', 'k' || n % 1000, repeat('x', 100) FROM generate_series(1, {ROWS}) AS n"
        );
        client.batch_execute(&fill).await.expect("filled");
        for analysed in [false, true] {
            if analysed {
                client.batch_execute("ANALYZE postbox.outbox").await.expect("analysed");
            }
            for case in &CASES {
                let plan = explain(&store, client, case).await;
                let context = format!("{} (Postgres {}, analysed: {analysed})\n{plan}", case.name, version.number());
                assert!(!plan.contains("Seq Scan on outbox"), "{context}");
                assert!(!plan.contains("Hash Join") && !plan.contains("Merge Join"), "{context}");
                assert!(!plan.contains("lane_pkey"), "{context}");
                assert!(!plan.contains(" on lane") || plan.contains("Tid Scan on lane"), "{context}");
                for index in case.indexes {
                    assert!(plan.contains(&format!(" {index} ")), "not through {index}: {context}");
                }
                let touched = rows_touched(&plan);
                assert!(touched <= case.rows_max, "{touched} rows touched: {context}");
            }
        }
        session.finish();
    }
}

async fn explain(store: &PostgresStore, client: &Client, case: &Case) -> String {
    let mut sql = SchemaName::default().log_sql(case.sql, &LogName::outbox()).replace("{place}", case.place);
    for (index, value) in case.params.iter().enumerate().rev() {
        sql = sql.replace(&format!("${}", index + 1), value);
    }
    let preamble = match (case.pinned, case.sql.contains("UPDATE")) {
        (true, true) => store.inner.preambles.change.as_str(),
        (true, false) => store.inner.preambles.read.as_str(),
        (false, _) => "BEGIN READ ONLY",
    };
    client.batch_execute(preamble).await.expect("begun");
    let rows = client.query_typed(&format!("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {sql}"), &[]).await;
    let rows = rows.unwrap_or_else(|error| panic!("{}: {error:?}\n{sql}", case.name));
    client.batch_execute("COMMIT").await.expect("ended");
    let lines: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    lines.join("\n")
}

/// Rows that scans of the log gave or threw away.
fn rows_touched(plan: &str) -> u64 {
    let mut touched = 0.0;
    let mut in_log = false;
    for line in plan.lines() {
        if line.contains("actual rows=") || line.contains("never executed") {
            in_log = line.contains("outbox");
        }
        let number = |after: &str| -> f64 {
            let rest = line.split(after).nth(1).unwrap_or_default();
            let digits: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
            digits.parse().unwrap_or_default()
        };
        if in_log && line.contains("actual rows=") {
            touched += number("rows=") * number("loops=");
        }
        if in_log && line.contains("Rows Removed by") {
            touched += number(": ");
        }
    }
    touched as u64
}
