//! What the roles of a system need, as SQL: no more than that.

use postbox_core::{Error, Inspect as _, LogName, Result};

use crate::PostgresStore;
use crate::append::APPEND_COLUMNS;
use crate::row_security::policies;

/// Roles by what they do; each may be named in several.
#[derive(Debug, Clone, Default)]
pub struct Roles {
    /// They append events in their transactions, by INSERT, by `enqueue` or by `Postbox::append`.
    pub writers: Vec<String>,
    /// They deliver, receive, retry, discard, mark dead, pause and prune: what `postbox run` does,
    /// and the commands that change something; the functions of the same names, too.
    pub relays: Vec<String>,
    /// They look: what `postbox stats`, `list`, `show` and `doctor` do, and the views.
    pub readers: Vec<String>,
    /// Of these, and of other roles, those that work for every tenant. If there are any, all others
    /// are limited to the tenant that their transaction names.
    pub all_tenants: Vec<String>,
}

impl PostgresStore {
    /// The GRANT statements that these roles need on this store, and the policies that keep tenants
    /// apart where that is asked for, for its owner to run; again after a log was made.
    pub async fn grants(&self, roles: &Roles) -> Result<String> {
        let Roles { writers, relays, readers, all_tenants } = roles;
        if [writers, relays, readers, all_tenants].into_iter().flatten().any(String::is_empty) {
            return Err(Error::invalid("grants", "role_invalid", "a role without a name; name it, or leave it out"));
        }
        let logs = self.logs().await?;
        let mut sql = String::new();
        let quoted = |roles: &[String]| {
            roles.iter().map(|role| format!("\"{}\"", role.replace('"', "\"\""))).collect::<Vec<_>>().join(", ")
        };
        let mut grant = |rights: &str, of: &str, to: &[String]| {
            if !to.is_empty() {
                sql.push_str(&self.schema().sql(&format!("GRANT {rights} ON {of} TO ")));
                sql.push_str(&quoted(to));
                sql.push_str(";\n");
            }
        };
        for roles in [writers, relays, readers] {
            grant("USAGE", "SCHEMA {s}", roles);
        }
        grant("SELECT", "{s}.log", writers);
        let insert = format!("INSERT ({APPEND_COLUMNS})");
        for log in &logs {
            let (table, has) = (format!("{{s}}.\"{log}\""), format!("FUNCTION {{s}}.\"{log}_has\""));
            if *log != LogName::inbox() {
                grant(&insert, &table, writers);
                grant("EXECUTE", &has, writers);
            }
            grant(&format!("SELECT, DELETE, {insert}"), &table, relays);
            grant("EXECUTE", &has, relays);
            grant("SELECT", &table, readers);
            for roles in [relays, readers] {
                grant("SELECT", &format!("{{s}}.\"{log}_state\", {{s}}.\"{log}_dead\""), roles);
            }
        }
        grant("SELECT", "{s}.migration, {s}.log, {s}.stats", relays);
        grant("UPDATE (routed_xid, routed_seq, taken_snap, epoch_next)", "{s}.log", relays);
        grant("SELECT, INSERT, UPDATE", "{s}.sleeper, {s}.passage", relays);
        grant("SELECT, INSERT", "{s}.filter", relays);
        grant("SELECT, INSERT, DELETE", "{s}.unrouted, {s}.sent", relays);
        grant(
            "SELECT, INSERT, UPDATE, DELETE",
            "{s}.subscription, {s}.lane, {s}.delivery, {s}.replica, {s}.receipt, {s}.once, {s}.conflict",
            relays,
        );
        grant(
            "SELECT",
            "{s}.migration, {s}.log, {s}.stats, {s}.subscription, {s}.lane, {s}.delivery, {s}.filter, {s}.passage, {s}.unrouted, {s}.sent, {s}.replica, {s}.conflict",
            readers,
        );
        if !all_tenants.is_empty() {
            sql.push_str(&policies(self.schema(), &logs, &quoted(all_tenants)));
        }
        Ok(sql)
    }
}
