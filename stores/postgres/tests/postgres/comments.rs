//! The descriptions that psql shows with `\d+` and `\df+`, and the guide's tables made from them.

use std::path::Path;

use postbox_testkit::servers::Version;
use tokio_postgres::Client;

use crate::support;

/// Functions that users call; the others are internal.
const CALLED: [&str; 14] = [
    "enqueue",
    "event_id",
    "receive",
    "once",
    "retry",
    "discard",
    "mark_dead",
    "pause",
    "resume",
    "depth",
    "create_log",
    "guard_log",
    "notify_enable",
    "notify_disable",
];

async fn texts(client: &Client, sql: &str) -> Vec<Vec<String>> {
    let rows = client.query(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    rows.iter().map(|row| (0..row.len()).map(|at| row.get::<_, String>(at)).collect()).collect()
}

fn table(head: &str, rows: Vec<Vec<String>>) -> String {
    let mut table = format!("\n{head}\n{}\n", "|---".repeat(head.matches('|').count() - 1) + "|");
    for row in rows {
        table += &format!("| `{}` | {} |\n", row[0], row[1..].join(" | "));
    }
    table
}

#[tokio::test]
async fn whatever_a_person_sees_has_a_comment() {
    let fixture = support::on(Version::V15).await;
    let client = fixture.client().await;
    client.batch_execute("SELECT postbox.create_log('third')").await.expect("made");
    let columns = "SELECT c.relname::text, a.attname::text FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0
        WHERE c.relnamespace = 'postbox'::regnamespace AND c.relkind IN ('r', 'v') AND col_description(c.oid, a.attnum) IS NULL";
    let relations = "SELECT c.relname::text FROM pg_class AS c WHERE c.relnamespace = 'postbox'::regnamespace AND c.relkind IN ('r', 'v')
        AND obj_description(c.oid, 'pg_class') IS NULL";
    let functions = "SELECT p.oid::regprocedure::text FROM pg_proc AS p
        WHERE p.pronamespace = 'postbox'::regnamespace AND obj_description(p.oid, 'pg_proc') IS NULL";
    let schema = "SELECT 'postbox' WHERE obj_description('postbox'::regnamespace, 'pg_namespace') IS NULL";
    for without in [columns, relations, functions, schema] {
        assert_eq!(texts(&client, without).await, Vec::<Vec<String>>::new());
    }
    for name in CALLED {
        let said = format!(
            "SELECT coalesce(obj_description(p.oid, 'pg_proc'), '') FROM pg_proc AS p
             WHERE p.pronamespace = 'postbox'::regnamespace AND p.proname = '{name}'"
        );
        let said = texts(&client, &said).await;
        let is_said = |it: &Vec<String>| !it[0].is_empty() && it[0] != "internal";
        assert!(!said.is_empty() && said.iter().all(is_said), "{name}: {said:?}");
    }
}

/// The guide's tables match the comments in the database. `UPDATE=1` rewrites them.
#[tokio::test]
async fn the_tables_of_the_guide_are_the_comments() {
    let fixture = support::on(Version::V15).await;
    let client = fixture.client().await;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/sql.md");
    let guide = std::fs::read_to_string(&path).expect("the guide");
    let mut fresh = guide.clone();
    for of in ["stats", "outbox_state", "outbox_dead", "functions"] {
        let rows = match of {
            "functions" => {
                let sql = "SELECT DISTINCT ON (called.n) p.proname || '(' || replace(regexp_replace(
                      pg_get_function_arguments(p.oid), '::(text|uuid|bigint|jsonb|timestamp with time zone)', '', 'g'),
                      'timestamp with time zone', 'timestamptz') || ')', obj_description(p.oid, 'pg_proc')
                    FROM unnest(string_to_array($$CALLED$$, ',')) WITH ORDINALITY AS called(name, n)
                    JOIN pg_proc AS p ON p.pronamespace = 'postbox'::regnamespace AND p.proname = called.name ORDER BY called.n, p.oid";
                table("| function | |", texts(&client, &sql.replace("CALLED", &CALLED.join(","))).await)
            }
            view => {
                let sql = format!(
                    "SELECT a.attname::text, format_type(a.atttypid, NULL), col_description(a.attrelid, a.attnum)
                     FROM pg_attribute AS a WHERE a.attrelid = 'postbox.{view}'::regclass AND a.attnum > 0 ORDER BY a.attnum"
                );
                table("| column | type | |", texts(&client, &sql).await)
            }
        };
        let (begin, end) = (format!("<!-- {of} -->\n"), format!("<!-- end of {of} -->"));
        let (before, rest) = fresh.split_once(&begin).unwrap_or_else(|| panic!("the place of {of}"));
        let (_, after) = rest.split_once(&end).expect("its end");
        fresh = format!("{before}{begin}{rows}\n{end}{after}");
    }
    if std::env::var_os("UPDATE").is_some() {
        return std::fs::write(&path, fresh).expect("the guide can be written");
    }
    assert!(
        guide == fresh,
        "docs/guide/sql.md: not as the database says; run UPDATE=1 cargo nextest run --workspace --all-features --test postgres -E \
         'test(tables_of_the_guide)'"
    );
}
