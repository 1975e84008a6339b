//! The schema: its name, safely quoted, and the statements that are made with it.

mod template;

use std::fmt;
use std::str::FromStr;

use postbox_core::{Error, LogName, Result};

use crate::criteria::is_meant;

/// The schema, as one migration: what a lane calls, what receives, what counts, what a person
/// changes, the tables, and what a person sees.
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
    include_str!("0001_spine.sql"),
    "\n",
    include_str!("0001_views.sql"),
    "\n",
    include_str!("0001_comments.sql")
);

/// Longest identifier Postgres keeps; it cuts longer ones with only a notice, so that two names
/// could become one.
const IDENTIFIER_BYTES_MAX: usize = 63;

/// Our own tables and views, and what would have functions like ours (`create_window`): no log may
/// be called like one.
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

/// Every log. Reads a tiny table.
pub(crate) const LOG_NAMES: &str = "SELECT name FROM {s}.log ORDER BY name";

/// The schema all tables and functions of a store live in. Any text is allowed that Postgres can
/// keep: it is always quoted.
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
        // Without the E prefix a backslash stands for itself under standard_conforming_strings,
        // which migrations pin.
        format!("'{escaped}'")
    }

    /// Fills a template; see [`template`].
    pub(crate) fn sql(&self, template: &str) -> String {
        self.fill(template, &[])
    }

    /// The same, and `{log}` with the log's table and `{name}` with its name.
    pub(crate) fn log_sql(&self, template: &str, log: &LogName) -> String {
        self.log_sql_with(template, log, &[])
    }

    /// The same with more values.
    pub(crate) fn log_sql_with(&self, template: &str, log: &LogName, values: &[(&str, &str)]) -> String {
        let table = format!("{}.\"{log}\"", self.quoted);
        self.fill(template, &[&[("log", table.as_str()), ("name", log.as_str())], values].concat())
    }

    /// The same with more values, and without a log.
    pub(crate) fn sql_with(&self, template: &str, values: &[(&str, &str)]) -> String {
        self.fill(template, values)
    }

    /// A dollar-quote tag that the schema's name does not contain, so that no name can end a body.
    pub(crate) fn tag(&self) -> String {
        (0..).map(|n| format!("postbox{n}")).find(|tag| !self.name.contains(tag.as_str())).unwrap_or_default()
    }

    /// Fills a migration. With [`Self::tag`], no name can be taken for the log's either in a
    /// function that is made for each log: there `{log}` and `{name}` stand for what is replaced by
    /// the log's.
    pub(crate) fn migration_sql(&self, template: &str) -> String {
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

/// Refuses names that are tables, but no logs.
pub(crate) fn check_log_name(operation: &'static str, log: &LogName) -> Result<()> {
    if RESERVED_NAMES.contains(&log.as_str()) {
        return Err(crate::classify::log_unknown(operation, log.as_str()));
    }
    Ok(())
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

    /// A line break in a name would end the comment, and the rest of the name would be SQL.
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

    /// A database in another encoding could not even read them.
    #[test]
    fn migrations_are_ascii() {
        assert_eq!(MIGRATION.lines().find(|line| !line.is_ascii()), None);
    }
}
