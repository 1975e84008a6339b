//! The topic that an event is published to: a template, and what no topic may contain.

use postbox_core::template::NameRules;
use postbox_core::{Event, Outcome, Template};

/// The longest name of a topic, in bytes.
const NAME_BYTES_MAX: usize = 249;

const RULES: NameRules = NameRules { what: "topic", code: "topic_invalid", separator: None, check };

/// Parses a template of topics.
pub(crate) fn parse(text: &str) -> Result<Template, String> {
    RULES.parse(text)
}

/// Returns the topic of an event. The error is [`Outcome::Dead`]: the event will never have one.
pub(crate) fn render(template: &Template, event: &Event) -> Result<String, Outcome> {
    RULES.name(template, event)
}

/// Checks a topic. The error says what is wrong, and does not repeat the topic.
pub(crate) fn check(topic: &str) -> Result<(), String> {
    let is_free = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let fault = match () {
        () if topic.is_empty() => "it is empty".into(),
        () if topic.len() > NAME_BYTES_MAX => {
            format!("it would have {} bytes; at most {NAME_BYTES_MAX} are allowed", topic.len())
        }
        () if !topic.bytes().all(is_free) => "only ASCII letters, digits, '.', '_' and '-' are allowed".into(),
        () if topic == "." || topic == ".." => "'.' and '..' are no names".into(),
        () if topic.starts_with("__") => "what begins with __ belongs to the brokers".into(),
        () => return Ok(()),
    };
    Err(fault)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use postbox_core::{EventId, NewEvent};

    use super::*;

    fn render(template: &str, new: NewEvent) -> Result<String, Outcome> {
        let event = new.into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
        super::render(&parse(template).expect("a template"), &event)
    }

    #[test]
    fn no_hostile_value_becomes_another_topic() {
        let long = "t".repeat(NAME_BYTES_MAX + 1);
        for value in ["a b", "a\r\nb", "\0", "ż", "a/b", "a:b", "*", ".", "..", "__consumer_offsets", "__x", &long] {
            let dead = render("{topic}", NewEvent::json(value, "")).expect_err(value);
            assert!(matches!(&dead, Outcome::Dead { code, .. } if code == RULES.code), "{value:?}: {dead:?}");
        }
        let event = |tenant: &str, topic: &str| NewEvent::json(topic, "").tenant(tenant);
        assert_eq!(render("{tenant}.{topic}", event("a", "b.c")).as_deref(), Ok("a.b.c"));
        assert!(render("{tenant}.{topic}", event("a.b", "c")).is_err(), "it would be the other's");
        assert!(render("x.{key}", NewEvent::json("t", "")).is_err(), "no key");
        assert!(render("x.{topic}", NewEvent::json("__consumer_offsets", "")).is_ok(), "harmless behind a prefix");
    }

    #[test]
    fn a_template_is_checked_where_it_is_written() {
        for (wrong, word) in [
            ("", "empty"),
            ("a b", "letters"),
            ("__{topic}", "belongs"),
            ("{what}", "no field"),
            ("topic}}", "letters"),
            ("{tenant}{topic}", "between"),
            ("..", "no names"),
        ] {
            let fault = parse(wrong).expect_err("a fault");
            assert!(fault.contains(word), "{wrong:?}: {fault}");
        }
    }
}
