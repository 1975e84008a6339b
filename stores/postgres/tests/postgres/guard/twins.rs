//! Somebody who may create objects in a schema of our search_path plants functions, operators and
//! types that match our arguments as well as Postgres's own, or better. None of them is ever called
//! with our rights.

use postbox_core::{Maintain as _, Migrate as _};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_testkit::servers::{Postgres, Version};
use tokio_postgres::Client;

use super::everything::{by_hand, everything};
use crate::support;

/// Name, arguments, result.
const FUNCTIONS: [(&str, &str, &str); 40] = [
    ("num_nonnulls", "text, bytea", "int"),
    ("num_nonnulls", "text, text", "int"),
    ("num_nonnulls", "text, text, text", "int"),
    ("cardinality", "xid8[]", "int"),
    ("cardinality", "int[]", "int"),
    ("array_fill", "text, int[]", "text[]"),
    ("unnest", "text[]", "SETOF text"),
    ("unnest", "bigint[]", "SETOF bigint"),
    ("unnest", "xid8[]", "SETOF xid8"),
    ("octet_length", "text", "int"),
    ("octet_length", "bytea", "int"),
    ("left", "text, int", "text"),
    ("right", "text, int", "text"),
    ("lpad", "text, int, text", "text"),
    ("replace", "text, text, text", "text"),
    ("to_hex", "bigint", "text"),
    ("floor", "numeric", "numeric"),
    ("gen_random_uuid", "", "uuid"),
    ("clock_timestamp", "", "timestamptz"),
    ("statement_timestamp", "", "timestamptz"),
    ("convert_to", "text, text", "bytea"),
    ("convert_to", "text, name", "bytea"),
    ("substr", "bytea, int, int", "bytea"),
    ("quote_ident", "text", "text"),
    ("quote_literal", "text", "text"),
    ("current_setting", "text", "text"),
    ("set_config", "text, text, boolean", "text"),
    ("pg_current_xact_id", "", "xid8"),
    ("pg_current_snapshot", "", "pg_snapshot"),
    ("pg_snapshot_xmax", "pg_snapshot", "xid8"),
    ("pg_snapshot_xip", "pg_snapshot", "SETOF xid8"),
    ("pg_visible_in_snapshot", "xid8, pg_snapshot", "boolean"),
    ("pg_is_in_recovery", "", "boolean"),
    ("currval", "regclass", "bigint"),
    ("jsonb_typeof", "jsonb", "text"),
    ("chr", "int", "text"),
    ("isfinite", "timestamptz", "boolean"),
    ("getdatabaseencoding", "", "name"),
    ("hashtextextended", "text, bigint", "bigint"),
    ("generate_series", "int, int", "SETOF int"),
];

/// Operator, both arguments, result.
const OPERATORS: [(&str, &str, &str, &str); 30] = [
    ("%", "smallint", "int", "int"),
    ("%", "smallint", "smallint", "smallint"),
    ("=", "text", "text", "boolean"),
    ("=", "int", "int", "boolean"),
    ("=", "smallint", "int", "boolean"),
    ("=", "smallint", "smallint", "boolean"),
    ("=", "bigint", "bigint", "boolean"),
    ("=", "uuid", "uuid", "boolean"),
    ("=", "tid", "tid", "boolean"),
    ("<>", "text", "text", "boolean"),
    ("<>", "xid8", "xid8", "boolean"),
    ("<>", "jsonb", "jsonb", "boolean"),
    ("<>", "int", "int", "boolean"),
    (">=", "xid8", "xid8", "boolean"),
    ("<=", "xid8", "xid8", "boolean"),
    ("<=", "bigint", "int", "boolean"),
    (">", "bigint", "bigint", "boolean"),
    ("<=", "bigint", "bigint", "boolean"),
    (">", "int", "int", "boolean"),
    ("<", "int", "int", "boolean"),
    (">", "timestamptz", "timestamptz", "boolean"),
    ("<=", "timestamptz", "timestamptz", "boolean"),
    ("<", "timestamptz", "timestamptz", "boolean"),
    ("-", "timestamptz", "timestamptz", "interval"),
    ("-", "timestamptz", "interval", "timestamptz"),
    ("*", "bigint", "interval", "interval"),
    ("||", "text", "text", "text"),
    ("~", "text", "text", "boolean"),
    ("!~", "text", "text", "boolean"),
    ("~~", "text", "text", "boolean"),
];

/// Types that a cast in our statements could resolve to.
const TYPES: [&str; 6] = ["text", "jsonb", "uuid", "timestamptz", "bytea", "xid8"];

/// Plants the functions. Each records that it was called, then does what the real one does.
async fn plant(client: &Client) {
    let in_full = |types: &str| -> String {
        let one = |name: &str| match name.trim().trim_end_matches("[]") {
            "" => String::new(),
            "int" | "bigint" | "smallint" | "boolean" | "numeric" | "interval" => name.trim().to_owned(),
            _ => format!("pg_catalog.{}", name.trim()),
        };
        types.split(',').map(one).collect::<Vec<_>>().join(", ")
    };
    let mut sql = String::from(
        "CREATE TABLE public.called (what pg_catalog.text);
         CREATE FUNCTION public.note(what pg_catalog.text) RETURNS boolean LANGUAGE plpgsql AS
         'BEGIN INSERT INTO public.called VALUES (what); RETURN true; END';",
    );
    for (at, (name, arguments, result)) in FUNCTIONS.iter().enumerate() {
        let count = arguments.split(',').filter(|it| !it.trim().is_empty()).count();
        let places: Vec<String> = (1..=count).map(|n| format!("${n}")).collect();
        let (set, of) = match result.strip_prefix("SETOF ") {
            Some(of) => ("SETOF ", of),
            None => ("", *result),
        };
        let answer = if set.is_empty() { "RETURN (SELECT" } else { "RETURN QUERY (SELECT" };
        sql += &format!(
            "CREATE FUNCTION public.{name}({}) RETURNS {set}{} LANGUAGE plpgsql AS
             $$ BEGIN PERFORM public.note('{name} {at}'); {answer} pg_catalog.\"{name}\"({})); END $$;\n",
            in_full(arguments),
            in_full(of),
            places.join(", ")
        );
    }
    for (at, (name, left, right, result)) in OPERATORS.iter().enumerate() {
        let (left, right, result) = (in_full(left), in_full(right), in_full(result));
        sql += &format!(
            "CREATE FUNCTION public.twin_{at}({left}, {right}) RETURNS {result} LANGUAGE plpgsql AS
             $$ BEGIN PERFORM public.note('operator {name} {at}'); RETURN ($1 OPERATOR(pg_catalog.{name}) $2); END $$;
             CREATE OPERATOR public.{name} (FUNCTION = public.twin_{at}, LEFTARG = {left}, RIGHTARG = {right});\n"
        );
    }
    for name in TYPES {
        sql += &format!(
            "CREATE DOMAIN public.{name} AS pg_catalog.{name} CHECK (public.note(pg_catalog.concat('type {name}', VALUE IS NULL)));\n"
        );
    }
    client.batch_execute(&sql).await.expect("planted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_planted_on_the_search_path_is_called() {
    for version in Version::ALL {
        let server = Postgres::shared(version).await;
        let url = server.fresh_database().await;
        let planter = support::client(&url).await;
        planter.batch_execute("SET search_path = pg_catalog").await.expect("set");
        plant(&planter).await;
        // The worst search path: planted objects come before Postgres's own even where both match
        // equally well.
        for path in ["public", "public%2Cpg_catalog"] {
            let url = format!("{url}?options=-c%20search_path%3D{path}");
            let schema = if path == "public" { "first" } else { "second" };
            // The migration runs with that path, too.
            let config = PostgresConfig { schema: schema.into(), notify: true, ..PostgresConfig::new(&url) };
            let store = support::migrated(config.clone()).await;
            let client = support::client(&url).await;
            everything(&store, &client, &store).await;
            by_hand(&client, store.schema().quoted()).await;
            store.rebase().await.expect("rebased");
            let again = PostgresStore::connect(PostgresConfig { notify: false, ..config }).await.expect("connected");
            again.check_receiving().await.expect("checked");
            again.create_log(&"third".parse().expect("a name")).await.expect("made");
            again.down(true).await.expect("removed");
            let called = planter
                .query("SELECT what, count(*) FROM public.called GROUP BY what ORDER BY 2 DESC", &[])
                .await
                .expect("asked");
            let called: Vec<(String, i64)> = called.iter().map(|row| (row.get(0), row.get(1))).collect();
            assert!(called.is_empty(), "{} with search_path = {path}: {called:?}", version.name());
        }
        // Statements without our protection call them, so the test can fail.
        let bare = support::client(&format!("{url}?options=-c%20search_path%3Dpublic")).await;
        bare.batch_execute("SELECT num_nonnulls('a'::text, NULL::bytea), 1::smallint % 1").await.expect("asked");
        let called: i64 = planter.query_one("SELECT count(*) FROM public.called", &[]).await.expect("asked").get(0);
        assert_eq!(called, 2);
    }
}
