//! Row-level security, as SQL: policies that show each transaction only the rows of the tenant it
//! names. `docs/decisions/tenants-are-kept-apart-by-policies.md` has the reasons.

use postbox_core::LogName;

use crate::schema::SchemaName;

/// The tenant of the transaction. The empty string means none: a setting reads as empty if it was
/// set in an earlier transaction of the session.
const NAMED: &str = "nullif(current_setting('postbox.tenant', true), '')";

/// The same, evaluated once per statement. Reading many rows takes half the time, appending one a
/// sixth more (measured).
const NAMED_ONCE: &str = "(SELECT nullif(current_setting('postbox.tenant', true), ''))";

/// What belongs to a subscription belongs to its tenant. A subscription belongs to a tenant unless
/// it once belonged to another (`mixed`). The subqueries see what the policies of their own tables
/// show. What is sent is limited where it is read (`due`).
const TABLES: [(&str, &str); 10] = [
    ("subscription", "tenant = {named_once} AND NOT mixed"),
    ("lane", OF_SUBSCRIPTION),
    ("delivery", OF_SUBSCRIPTION),
    ("filter", OF_FILTER),
    ("passage", OF_SUBSCRIPTION),
    ("sent", OF_SUBSCRIPTION),
    ("replica", OF_SUBSCRIPTION),
    ("receipt", OF_TENANT),
    ("conflict", OF_TENANT),
    ("once", OF_TENANT),
];

const OF_SUBSCRIPTION: &str = "subscription IN (SELECT s.id FROM {s}.subscription AS s)";

/// A replay by somebody who sees all tenants follows the filters, so they must name the tenant.
const OF_FILTER: &str = "subscription IN (SELECT s.id FROM {s}.subscription AS s) AND tenant = {named_once}";

/// A tenant cannot change or delete anything in a log, because others read it too.
const OF_LOG: &str = "
CREATE POLICY tenant_reads ON {log} FOR SELECT USING (tenant = {named_once});
CREATE POLICY tenant_appends ON {log} FOR INSERT WITH CHECK (tenant = {named});
";

/// Every role may read the names of logs. How far each log was checked for routing is written for
/// all tenants. Not forced, because the owner creates logs.
const OF_LOGS: &str = "
CREATE POLICY everybody_reads ON {log} FOR SELECT USING (true);
";

/// The rows of the transaction's tenant.
const OF_TENANT: &str = "tenant = {named_once}";

/// Locks every table before anything changes. Relays and writers go on meanwhile and lock in their
/// own orders. Each wait is therefore shorter than the server's deadlock timeout, and the locks are
/// released before the next try, so that nobody becomes the victim of a deadlock.
const LOCK_ALL: &str = "
DO ${tag}$ BEGIN
  FOR try IN 1..100 LOOP
    BEGIN
      PERFORM set_config('lock_timeout', '200ms', true);
      LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE;
      RETURN;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
      PERFORM pg_sleep(0.1 * random());
    END;
  END LOOP;
  RAISE EXCEPTION 'the tables could not be locked: other transactions have held them for too long' USING ERRCODE = 'lock_not_available',
    HINT = 'nothing was changed; end the open transactions that pg_stat_activity shows, and run this again';
END ${tag}$;
";

/// Returns SQL that replaces the policies on every table with data of tenants. `everyone` are the
/// roles that work for all tenants, quoted.
pub(crate) fn policies(schema: &SchemaName, logs: &[LogName], everyone: &str) -> String {
    // Names in a policy are resolved when the policy is created.
    let mut sql = "BEGIN;\nSET LOCAL search_path = pg_catalog;\nSET LOCAL client_min_messages = warning;\n".to_owned();
    let own = TABLES
        .iter()
        .map(|(table, _)| *table)
        .chain(["unrouted", "log", "sleeper"])
        .map(|table| format!("{{s}}.{table}"));
    let tables = own.chain(logs.iter().map(|log| format!("{{s}}.\"{log}\""))).collect::<Vec<_>>().join(", ");
    sql.push_str(schema.sql_with(LOCK_ALL, &[("tables", &schema.sql(&tables)), ("tag", &schema.tag())]).trim_start());
    let mut protect = |table: &str, own: &str, forced: bool| {
        let force = if forced { ", FORCE ROW LEVEL SECURITY" } else { "" };
        let mut lines = format!("ALTER TABLE {{log}} ENABLE ROW LEVEL SECURITY{force};\n");
        for policy in ["tenant", "tenant_reads", "tenant_appends", "everybody_reads", "all_tenants"] {
            lines.push_str(&format!("DROP POLICY IF EXISTS {policy} ON {{log}};\n"));
        }
        lines.push_str(own.trim_start());
        lines.push_str("CREATE POLICY all_tenants ON {log} TO {everyone} USING (true) WITH CHECK (true);\n");
        let values = [("log", table), ("named", NAMED), ("named_once", NAMED_ONCE), ("everyone", everyone)];
        sql.push_str(&schema.sql_with(&lines, &values));
    };
    let only = |own: &str| format!("CREATE POLICY tenant ON {{log}} USING ({own}) WITH CHECK ({own});\n");
    for log in logs {
        protect(&schema.log_sql("{log}", log), OF_LOG, true);
    }
    for (table, own) in TABLES {
        protect(&schema.sql(&format!("{{s}}.{table}")), &only(own), true);
    }
    let in_log = |log: &LogName| {
        format!("(log = '{log}' AND EXISTS (SELECT FROM {{s}}.\"{log}\" AS l WHERE l.seq = unrouted.seq))")
    };
    let own = logs.iter().map(in_log).collect::<Vec<_>>().join(" OR ");
    protect(&schema.sql("{s}.unrouted"), &only(&own), true);
    protect(&schema.sql("{s}.log"), OF_LOGS, false);
    // Not forced, because the function that wakes relays looks with its owner's rights.
    protect(&schema.sql("{s}.sleeper"), &only(OF_TENANT), false);
    sql.push_str("COMMIT;\n");
    sql
}
