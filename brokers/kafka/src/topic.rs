//! The topic that an event is published to: a template, and what no topic may contain.

use postbox_core::template::NameRules;

/// The longest name of a topic, in bytes.
const NAME_BYTES_MAX: usize = 249;

pub(crate) const RULES: NameRules = NameRules { what: "topic", code: "topic_invalid", separator: None, check };

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
    use postbox_core::{EventId, NewEvent, Outcome};

    use super::*;

    fn render(template: &str, new: NewEvent) -> Result<String, Outcome> {
        let event = new.into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
        RULES.name(&RULES.parse(template).expect("a template"), &event)
    }

    #[test]
    fn no_hostile_value_becomes_another_topic() {
        let long = "t".repeat(NAME_BYTES_MAX + 1);
        for value in ["a b", "a\r\nb", "\0", "ż", "a/b", "a:b", "*", ".", "..", "__consumer_offsets", "__x", &long] {
            let dead = render("{topic}", NewEvent::json(value, "")).expect_err(value);
            assert!(matches!(&dead, Outcome::Dead { code, .. } if code == RULES.code), "{value:?}: {dead:?}");
        }
        assert!(render("x.{topic}", NewEvent::json("__consumer_offsets", "")).is_ok(), "harmless behind a prefix");
    }

    #[test]
    fn a_template_is_checked_where_it_is_written() {
        for (wrong, word) in [("", "empty"), ("a b", "letters"), ("__{topic}", "belongs"), ("..", "no names")] {
            let fault = RULES.parse(wrong).expect_err("a fault");
            assert!(fault.contains(word), "{wrong:?}: {fault}");
        }
    }
}
