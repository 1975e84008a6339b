//! Newtypes for every name, so that a key is never passed where a topic is expected.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result, check};
use crate::limits::{KEY_BYTES_MAX, NAME_BYTES_MAX, TOPIC_BYTES_MAX};

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $check:path) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Checks and wraps a name. The error's code names the broken rule.
            pub fn new(name: impl Into<String>) -> Result<Self> {
                let name = name.into();
                $check(&name)?;
                Ok(Self(name))
            }

            /// Wraps a name that a store has checked already (its CHECK constraints mirror
            /// [`Self::new`]).
            pub fn from_stored(name: impl Into<String>) -> Self {
                Self(name.into())
            }

            /// Returns the name.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(name: &str) -> Result<Self> {
                Self::new(name)
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;

            fn try_from(name: String) -> Result<Self> {
                Self::new(name)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }
    };
}

name! {
    /// What happened, e.g. `order.paid`: 1 to 255 bytes, no white space, no control characters.
    Topic, check_topic
}
name! {
    /// The ordering key, usually the aggregate id: 1 to 1,024 bytes, no NUL.
    Key, check_key
}
name! {
    /// A log's name: `[a-z][a-z0-9_]*`, at most 40 bytes, because it becomes part of table names.
    LogName, check_log
}
name! {
    /// A subscription's name: 1 to 128 bytes of `[A-Za-z0-9._-]`.
    SubscriptionName, check_word
}
name! {
    /// Where inbound messages come from, e.g. `stripe`: 1 to 128 bytes of `[A-Za-z0-9._-]`.
    SourceName, check_word
}
name! {
    /// The name of one of a program's stores in its configuration: 1 to 128 bytes of
    /// `[A-Za-z0-9._-]`. A URL has a colon, so it is never a name.
    StoreName, check_word
}
name! {
    /// A tenant: 1 to 128 bytes, no control characters.
    Tenant, check_tenant
}
name! {
    /// The holder of a lease: one per running relay process, never reused. 1 to 128 bytes of
    /// `[A-Za-z0-9._-]`.
    OwnerId, check_word
}
name! {
    /// Which topics a subscription wants: literal text in which `*` stands for any run of
    /// characters, dots included.
    ///
    /// `order.*` matches `order.paid` and `order.item.added`, not `order`. `*` alone matches every
    /// topic. Apart from `*`, the rules of [`Topic`].
    TopicPattern, check_topic
}

impl LogName {
    /// Returns the log that every store has for outgoing events.
    pub fn outbox() -> Self {
        Self("outbox".into())
    }

    /// Returns the log that every store has for incoming messages.
    pub fn inbox() -> Self {
        Self("inbox".into())
    }
}

fn check_topic(topic: &str) -> Result<()> {
    check_length("topic", topic, TOPIC_BYTES_MAX)?;
    check(!topic.chars().any(|c| c.is_control() || c.is_whitespace()), "topic_invalid", || {
        "a topic has no white space and no control characters; use dots, as in order.paid".to_owned()
    })
}

fn check_key(key: &str) -> Result<()> {
    check_length("key", key, KEY_BYTES_MAX)?;
    check(!key.contains('\0'), "key_invalid", || "a key has no NUL character".to_owned())
}

fn check_log(name: &str) -> Result<()> {
    let first = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase());
    let rest = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    check(first && rest && name.len() <= 40, "log_name_invalid", || {
        format!(
            "{name:?} is not a valid log name: lower-case letters, digits and _, beginning with a letter, at most 40"
        )
    })
}

fn check_word(name: &str) -> Result<()> {
    check_length("name", name, NAME_BYTES_MAX)?;
    check(name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-')), "name_invalid", || {
        format!("{name:?} is not a valid name: only letters, digits, dot, underscore and hyphen")
    })
}

fn check_tenant(name: &str) -> Result<()> {
    check_length("tenant", name, NAME_BYTES_MAX)?;
    check(!name.chars().any(char::is_control), "tenant_invalid", || "a tenant has no control characters".to_owned())
}

fn check_length(what: &str, text: &str, bytes_max: usize) -> Result<()> {
    let (rule, message) = match text.len() {
        0 => ("empty", format!("the {what} is empty")),
        bytes if bytes > bytes_max => {
            ("too_long", format!("the {what} has {bytes} bytes; at most {bytes_max} are allowed"))
        }
        _ => return Ok(()),
    };
    Err(Error::invalid("validate", format!("{what}_{rule}"), message))
}

impl TopicPattern {
    /// Returns the pattern for SQL `LIKE … ESCAPE '\'`.
    pub fn to_like(&self) -> String {
        let mut like = String::with_capacity(self.0.len() + 4);
        for c in self.0.chars() {
            match c {
                '*' => like.push('%'),
                '%' | '_' | '\\' => {
                    like.push('\\');
                    like.push(c);
                }
                _ => like.push(c),
            }
        }
        like
    }

    /// Returns whether `topic` matches. Linear in the topic for each `*`; no recursion.
    pub fn matches(&self, topic: &str) -> bool {
        let mut parts = self.0.split('*');
        let Some(mut rest) = parts.next().and_then(|first| topic.strip_prefix(first)) else { return false };
        let Some(last) = self.0.rsplit('*').next().filter(|_| self.0.contains('*')) else {
            return rest.is_empty();
        };
        let middle: Vec<&str> = parts.collect();
        for part in &middle[..middle.len() - 1] {
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_any_run_of_characters() {
        for (pattern, topic, expected) in [
            ("order.*", "order.paid", true),
            ("order.*", "order.item.added", true),
            ("order.*", "order", false),
            ("*", "x", true),
            ("*.paid", "order.paid", true),
            ("*.paid", "order.paid.late", false),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "ac", false),
            ("a*a", "a", false),
            ("order.paid", "order.paid", true),
            ("order.paid", "order.paid2", false),
        ] {
            let matched = TopicPattern::new(pattern).expect("a valid pattern").matches(topic);
            assert_eq!(matched, expected, "{pattern} against {topic}");
        }
    }

    #[test]
    fn like_wildcards_in_a_pattern_are_literal() {
        assert_eq!(TopicPattern::new(r"a_b%\*").expect("valid").to_like(), r"a\_b\%\\%");
    }

    #[test]
    fn names_refuse_what_their_rule_excludes() {
        for (name, code) in [("", "topic_empty"), ("a b", "topic_invalid"), ("a\nb", "topic_invalid")] {
            assert_eq!(Topic::new(name).expect_err(name).code(), code);
        }
        assert_eq!(Topic::new("x".repeat(256)).expect_err("long").code(), "topic_too_long");
        assert_eq!(LogName::new("Out box").expect_err("log").code(), "log_name_invalid");
        assert_eq!(Key::new("a\0b").expect_err("key").code(), "key_invalid");
    }
}
