//! Everything works with any settings of the role or database.

#![allow(clippy::print_stdout, reason = "which setting it was, should one fail")]

use postbox_core::{Maintain as _, Migrate as _};
use postbox_postgres::PostgresConfig;
use postbox_testkit::servers::{Postgres, Version};

use super::everything::{by_hand, everything};
use crate::support;

/// Settings of the planner.
const PLANNER: [(&str, &str); 19] = [
    ("enable_seqscan", "off"),
    ("enable_indexscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("enable_nestloop", "off"),
    ("enable_sort", "off"),
    ("enable_hashagg", "off"),
    ("enable_material", "off"),
    ("plan_cache_mode", "force_custom_plan"),
    ("plan_cache_mode", "force_generic_plan"),
    ("jit", "on"),
    ("jit_above_cost", "0"),
    ("join_collapse_limit", "1"),
    ("from_collapse_limit", "1"),
    ("geqo_threshold", "2"),
    ("parallel_setup_cost", "0"),
    ("constraint_exclusion", "on"),
    ("work_mem", "64kB"),
];

/// Settings that change how values are read and written.
const VALUES: [(&str, &str); 19] = [
    ("standard_conforming_strings", "off"),
    ("escape_string_warning", "off"),
    ("backslash_quote", "off"),
    ("bytea_output", "escape"),
    ("DateStyle", "SQL, DMY"),
    ("DateStyle", "German"),
    ("IntervalStyle", "sql_standard"),
    ("TimeZone", "Pacific/Kiritimati"),
    ("timezone_abbreviations", "India"),
    ("xmloption", "document"),
    ("xmlbinary", "hex"),
    ("array_nulls", "off"),
    ("extra_float_digits", "-15"),
    ("lc_messages", "C"),
    ("lc_monetary", "C"),
    ("lc_numeric", "C"),
    ("lc_time", "C"),
    ("quote_all_identifiers", "on"),
    ("transform_null_equals", "on"),
];

/// Settings that limit or change what a session does.
const SESSION: [(&str, &str); 18] = [
    ("search_path", "nowhere"),
    ("search_path", "public, pg_catalog"),
    ("default_transaction_isolation", "serializable"),
    ("default_transaction_isolation", "repeatable read"),
    ("default_transaction_deferrable", "on"),
    ("lock_timeout", "1ms"),
    ("statement_timeout", "10s"),
    ("idle_in_transaction_session_timeout", "10s"),
    ("idle_session_timeout", "10s"),
    ("row_security", "off"),
    ("session_replication_role", "replica"),
    ("synchronous_commit", "off"),
    ("check_function_bodies", "off"),
    ("default_tablespace", "pg_default"),
    ("temp_tablespaces", "pg_default"),
    ("temp_buffers", "800kB"),
    ("client_min_messages", "debug1"),
    ("default_toast_compression", "pglz"),
];

/// Runs with one odd setting of each kind at a time. Settings of different kinds do not weaken each
/// other.
async fn everything_under_every_setting(version: Version) {
    let server = Postgres::shared(version).await;
    let url = server.fresh_database().await;
    let parallel = if version == Version::V15 { "force_parallel_mode" } else { "debug_parallel_query" };
    let sessions = SESSION.into_iter().chain([(parallel, "on")]);
    for (at, ((planner, values), session)) in PLANNER.into_iter().zip(VALUES).zip(sessions).enumerate() {
        // What a setting forbids costs 10^10 on Postgres 15, so its plans would all be compiled.
        let jit = if planner.0.starts_with("jit") { "on" } else { "off" };
        let settings = [planner, values, session, ("jit", jit)];
        println!("{settings:?}");
        let option = |(name, value): (&str, &str)| format!("-c {name}={} ", value.replace(' ', "\\ "));
        let options: String = settings.map(option).concat().bytes().map(|byte| format!("%{byte:02X}")).collect();
        let url = format!("{url}?options={options}");
        let config = PostgresConfig { schema: format!("s{at}"), ..PostgresConfig::new(&url) };
        let store = support::migrated(config).await;
        let client = support::client(&url).await;
        everything(&store, &client, &store).await;
        by_hand(&client, store.schema().quoted()).await;
        store.rebase().await.unwrap_or_else(|error| panic!("{settings:?}: {error:?}"));
        store.down(true).await.unwrap_or_else(|error| panic!("{settings:?}: {error:?}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_works_under_every_odd_setting_of_15() {
    everything_under_every_setting(Version::V15).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_works_under_every_odd_setting_of_18() {
    everything_under_every_setting(Version::V18).await;
}
