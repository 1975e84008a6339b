//! The minimal grants that each role needs, as SQL.

use postbox_core::{Error, LogName, Result};

use crate::append::APPEND_COLUMNS;
use crate::row_security::policies;
use crate::schema::SchemaName;

/// The tables of which every relay has these rights on all columns.
pub const RELAY_TABLES: [(&str, &[&str]); 3] = [
    ("SELECT, INSERT, UPDATE", &["passage"]),
    ("SELECT, INSERT, DELETE", &["unrouted", "sent"]),
    ("SELECT, INSERT, UPDATE, DELETE", &["delivery", "replica", "sleeper", "receipt", "once", "conflict"]),
];

/// Database roles by what they do. A role may be named in several.
#[derive(Debug, Clone, Default)]
pub struct Roles {
    /// They append events in their transactions, by INSERT, by `enqueue` or by `Postbox::append`.
    pub writers: Vec<String>,
    /// They deliver, receive, retry, discard, mark dead, pause and prune. This covers
    /// `postbox run`, the commands that change something, and the SQL functions of the same names.
    pub relays: Vec<String>,
    /// They only read. This covers `postbox stats`, `list`, `show` and `doctor`, and the views.
    pub readers: Vec<String>,
    /// Those of these roles, and any other roles, that work for every tenant. If there are any, all
    /// other roles are limited to the tenant that their transaction names.
    pub all_tenants: Vec<String>,
}

impl Roles {
    /// Returns the GRANT statements that these roles need on a schema with these logs, and the
    /// policies that separate tenants if `all_tenants` is given.
    pub fn grants(&self, schema: &SchemaName, logs: &[LogName]) -> Result<String> {
        let Self { writers, relays, readers, all_tenants } = self;
        if [writers, relays, readers, all_tenants].into_iter().flatten().any(String::is_empty) {
            return Err(Error::invalid("grants", "role_invalid", "a role without a name; name it, or leave it out"));
        }
        let (relays_for_all, relays_for_one): (Vec<String>, Vec<String>) =
            relays.iter().cloned().partition(|role| all_tenants.is_empty() || all_tenants.contains(role));
        let mut sql = String::new();
        let quoted = |roles: &[String]| {
            roles.iter().map(|role| format!("\"{}\"", role.replace('"', "\"\""))).collect::<Vec<_>>().join(", ")
        };
        if !relays_for_one.is_empty() {
            // What they had before there were tenants.
            let logs = logs.iter().map(|log| format!(", {{s}}.\"{log}\"")).collect::<String>();
            sql.push_str(
                &schema.sql(&format!("REVOKE ALL ON {{s}}.subscription, {{s}}.lane, {{s}}.filter{logs} FROM ")),
            );
            sql.push_str(&quoted(&relays_for_one));
            sql.push_str(";\n");
        }
        let mut grant = |rights: &str, of: &str, to: &[String]| {
            if !to.is_empty() {
                sql.push_str(&schema.sql(&format!("GRANT {rights} ON {of} TO ")));
                sql.push_str(&quoted(to));
                sql.push_str(";\n");
            }
        };
        for roles in [writers, relays, readers] {
            grant("USAGE", "SCHEMA {s}", roles);
        }
        grant("SELECT", "{s}.log", writers);
        let insert = format!("INSERT ({APPEND_COLUMNS})");
        for log in logs {
            let (table, has) = (format!("{{s}}.\"{log}\""), format!("FUNCTION {{s}}.\"{log}_has\""));
            let drawn = format!("SEQUENCE {{s}}.\"{log}_seq_seq\"");
            if *log != LogName::inbox() {
                grant(&insert, &table, writers);
                grant("EXECUTE", &has, writers);
                grant("SELECT", &drawn, writers);
            }
            grant(&format!("SELECT, {insert}"), &table, relays);
            grant("SELECT", &drawn, relays);
            grant("DELETE", &table, &relays_for_all);
            grant("EXECUTE", &has, relays);
            grant("SELECT", &table, readers);
            for roles in [relays, readers] {
                grant("SELECT", &format!("{{s}}.\"{log}_state\", {{s}}.\"{log}_dead\""), roles);
            }
        }
        grant("SELECT", "{s}.migration, {s}.log, {s}.stats", relays);
        grant("UPDATE (routed_xid, routed_seq, taken_snap, epoch_next, kept_from)", "{s}.log", relays);
        grant("SELECT", "{s}.filter", relays);
        grant("INSERT", "{s}.filter", &relays_for_all);
        for (rights, tables) in RELAY_TABLES {
            let tables: Vec<String> = tables.iter().map(|table| format!("{{s}}.{table}")).collect();
            grant(rights, &tables.join(", "), relays);
        }
        grant("SELECT, INSERT, UPDATE, DELETE", "{s}.subscription, {s}.lane", &relays_for_all);
        // Nobody makes, renames or changes a subscription for one tenant: its name could be one
        // that another tenant is about to use. Of a lane, a column that nothing depends on, for row
        // locks.
        grant("SELECT, UPDATE (paused_by, paused_why, paused_until, replays)", "{s}.subscription", &relays_for_one);
        grant("SELECT, UPDATE (delivered)", "{s}.lane", &relays_for_one);
        grant(
            "SELECT",
            "{s}.migration, {s}.log, {s}.stats, {s}.subscription, {s}.lane, {s}.delivery, {s}.filter, {s}.passage, {s}.unrouted, {s}.sent, {s}.replica, {s}.conflict",
            readers,
        );
        if !all_tenants.is_empty() {
            sql.push_str(&policies(schema, logs, &quoted(all_tenants)));
        }
        Ok(sql)
    }
}
