//! The schema: its name, safely quoted, and the statements that are built with it.

mod template;

use std::fmt;
use std::str::FromStr;

use postbox_core::{Error, LogName, Result};

use crate::refusal::log_unknown;
pub use template::EVENT_COLUMNS;

/// The whole schema as one migration: functions for lanes, for receiving, counting, operating and
/// waking, then the tables and the views.
pub(crate) const MIGRATION: &str = concat!(
    include_str!("0001_window.sql"),
    "\n",
    include_str!("0001_settle.sql"),
    "\n",
    include_str!("0001_append.sql"),
    "\n",
    include_str!("0001_receive.sql"),
    "\n",
    include_str!("0001_depth.sql"),
    "\n",
    include_str!("0001_operate.sql"),
    "\n",
    include_str!("0001_notify.sql"),
    "\n",
    include_str!("0001_spine.sql"),
    "\n",
    include_str!("0001_views.sql"),
    "\n",
    include_str!("0001_comments.sql")
);

/// The longest identifier, in bytes, that Postgres keeps. It cuts longer ones with only a notice,
/// so that two names could become one.
const IDENTIFIER_BYTES_MAX: usize = 63;

/// Names that no log may have: our own tables and views, and names whose functions would collide
/// with ours (`create_window`).
const RESERVED_NAMES: [&str; 16] = [
    "log",
    "subscription",
    "lane",
    "delivery",
    "filter",
    "passage",
    "sent",
    "unrouted",
    "receipt",
    "once",
    "conflict",
    "replica",
    "migration",
    "sleeper",
    "stats",
    "create",
];

/// The names of all logs. Reads a tiny table.
pub const LOG_NAMES: &str = "SELECT name FROM {s}.log ORDER BY name";

/// The schema that contains all tables and functions of a store. Any text that Postgres can keep is
/// allowed, because it is always quoted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaName {
    name: String,
    quoted: String,
}

impl SchemaName {
    /// Checks and quotes a name.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        let fault = if name.is_empty() {
            Some("is empty".to_owned())
        } else if name.len() > IDENTIFIER_BYTES_MAX {
            Some(format!("has {} bytes; Postgres keeps {IDENTIFIER_BYTES_MAX}", name.len()))
        } else if name.contains('\0') {
            Some("has a NUL character".to_owned())
        } else if name.starts_with("pg_") || name == "information_schema" {
            Some("is reserved by Postgres".to_owned())
        } else {
            None
        };
        match fault {
            Some(fault) => Err(Error::invalid("connect", "schema_name_invalid", format!("the schema name {fault}"))),
            None => Ok(Self { quoted: format!("\"{}\"", name.replace('"', "\"\"")), name }),
        }
    }

    /// The name as given.
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// The name as an SQL identifier.
    pub fn quoted(&self) -> &str {
        &self.quoted
    }

    /// The quoted identifier inside an SQL string literal.
    fn literal(&self) -> String {
        let escaped = self.quoted.replace('\'', "''");
        // Without the E prefix a backslash is literal under standard_conforming_strings, which
        // migrations set.
        format!("'{escaped}'")
    }

    /// Fills a template of `template.rs`.
    pub fn sql(&self, template: &str) -> String {
        self.fill(template, &[])
    }

    /// The same, with `{log}` as the log's table and `{name}` as its name.
    pub fn log_sql(&self, template: &str, log: &LogName) -> String {
        self.log_sql_with(template, log, &[])
    }

    /// The same with more values.
    pub fn log_sql_with(&self, template: &str, log: &LogName, values: &[(&str, &str)]) -> String {
        let table = format!("{}.\"{log}\"", self.quoted);
        self.fill(template, &[&[("log", table.as_str()), ("name", log.as_str())], values].concat())
    }

    /// The same with more values, and without a log.
    pub fn sql_with(&self, template: &str, values: &[(&str, &str)]) -> String {
        self.fill(template, values)
    }

    /// A dollar-quote tag that the schema's name does not contain, so that no name can end a body.
    pub fn tag(&self) -> String {
        (0..).map(|n| format!("postbox{n}")).find(|tag| !self.name.contains(tag.as_str())).unwrap_or_default()
    }

    /// Fills a migration. Functions that are created for each log contain `{log}` and `{name}`;
    /// these become placeholders that `create_log` replaces. They contain [`Self::tag`], so that no
    /// part of the schema's name can be mistaken for them.
    pub fn migration_sql(&self, template: &str) -> String {
        let tag = self.tag();
        let (name, log) = (format!("{tag}_log"), format!("{}.\"{tag}_log\"", self.quoted));
        let (literal, meant) = (self.literal(), is_meant([4, 5, 6, 7, 11]));
        let values =
            [("tag", &tag), ("name", &name), ("log", &log), ("schema_literal", &literal), ("is_meant", &meant)];
        self.fill(template, &values.map(|(name, value)| (name, value.as_str())))
    }

    fn fill(&self, template: &str, values: &[(&str, &str)]) -> String {
        let mut sql = String::with_capacity(template.len() * 2);
        template::fill(&mut sql, template, &[&[("s", self.quoted.as_str())], values].concat());
        sql
    }
}

impl Default for SchemaName {
    fn default() -> Self {
        Self { name: "postbox".to_owned(), quoted: "\"postbox\"".to_owned() }
    }
}

impl fmt::Display for SchemaName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl FromStr for SchemaName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

/// Refuses names of tables that are not logs.
pub fn check_log_name(operation: &'static str, log: &LogName) -> Result<()> {
    if RESERVED_NAMES.contains(&log.as_str()) {
        return Err(log_unknown(operation, log.as_str()));
    }
    Ok(())
}

/// Returns the condition on a row `l` of a log. The argument holds the parameter numbers of topic,
/// key, since, until and tenant.
pub fn is_meant([topic, key, since, until, tenant]: [u8; 5]) -> String {
    format!(
        "(${topic}::text IS NULL OR l.topic LIKE ${topic}) AND (${key}::text IS NULL OR l.key = ${key}) \
         AND (${since}::timestamptz IS NULL OR l.created_at >= ${since}) AND (${until}::timestamptz IS NULL OR l.created_at < ${until}) \
         AND (${tenant}::text IS NULL OR l.tenant = ${tenant})"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_and_bounded() {
        let schema = SchemaName::new("we\"ird").expect("a name");
        assert_eq!(schema.quoted(), "\"we\"\"ird\"");
        assert_eq!(SchemaName::new("x".repeat(64)).expect_err("long").code(), "schema_name_invalid");
        assert!(SchemaName::new("x".repeat(63)).is_ok());
        for bad in ["", "a\0b", "pg_catalog", "information_schema"] {
            assert!(SchemaName::new(bad).is_err(), "{bad:?}");
        }
    }

    /// A line break in a name would end the comment, and the rest of the name would run as SQL.
    #[test]
    fn no_comment_in_a_migration_has_a_placeholder() {
        let comments = MIGRATION.lines().filter_map(|line| line.split_once("--")).map(|(_, comment)| comment);
        assert!(comments.clone().count() > 10);
        for comment in comments {
            assert!(
                !["{s}", "{tag}", "{schema_literal}", "{log}", "{name}"].iter().any(|name| comment.contains(name)),
                "{comment}"
            );
        }
    }

    #[test]
    fn a_placeholder_inside_a_name_stays_text() {
        let schema = SchemaName::new("{log}{s}{tag}").expect("a name");
        assert_eq!(schema.log_sql("{s} {log}", &LogName::outbox()), r#""{log}{s}{tag}" "{log}{s}{tag}"."outbox""#);
        assert_eq!(schema.migration_sql("{s} {x}"), r#""{log}{s}{tag}" {x}"#);
        assert_eq!(schema.sql("a {<=} b '{}' {0,39} {"), "a OPERATOR(pg_catalog.<=) b '{}' {0,39} {");
    }

    /// A database in another encoding could not read anything else.
    #[test]
    fn migrations_are_ascii() {
        assert_eq!(MIGRATION.lines().find(|line| !line.is_ascii()), None);
    }
}
