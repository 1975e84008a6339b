//! The topic that an event is published to: a template, and what no topic may contain.
//!
//! A value that contains the text which follows its field in the template is refused. Otherwise
//! different events could get the same topic by accident: with `{tenant}.{topic}`, tenant `a` with
//! topic `b.c` and tenant `a.b` with topic `c`.

use postbox_config::from_core;
use postbox_core::{Event, Outcome, Template};

/// The longest name of a topic, in bytes.
const NAME_BYTES_MAX: usize = 249;

/// The code of an event that no topic can be made of.
const INVALID: &str = "topic_invalid";

/// Parses a template of topics.
pub(crate) fn parse(text: &str) -> Result<Template, String> {
    let template = from_core::<Template>(text)?;
    if let Some((_, field)) = template.adjacent() {
        let name = field.as_str();
        return Err(format!("nothing stands before {{{name}}} to end the field before it; write a \".\" there"));
    }
    // With a plain value for each field, the result must be a topic.
    let plain = template.fill(|_, _| Ok("x")).and_then(|topic| check(&topic));
    plain.map(|()| template).map_err(|fault| format!("{text:?} is no topic: {fault}"))
}

/// Returns the topic of an event. The error is [`Outcome::Dead`]: the event will never have one.
pub(crate) fn render(template: &Template, event: &Event) -> Result<String, Outcome> {
    let topic = template.fill(|field, behind| {
        let name = field.as_str();
        match field.of(event) {
            "" => Err(Outcome::dead(INVALID, format!("the event has no {name}, which the sink's topic names"))),
            value if !behind.is_empty() && value.contains(behind) => {
                let text = format!("the event's {name} holds {behind:?}, which ends it in the sink's topic");
                Err(Outcome::dead(INVALID, text))
            }
            value => Ok(value),
        }
    })?;
    check(&topic).map_err(|fault| Outcome::dead(INVALID, format!("no topic can be made of the event: {fault}")))?;
    Ok(topic)
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
            assert!(matches!(&dead, Outcome::Dead { code, .. } if code == INVALID), "{value:?}: {dead:?}");
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
            ("{tenant}{topic}", "before {topic}"),
            ("..", "no names"),
        ] {
            let fault = parse(wrong).expect_err("a fault");
            assert!(fault.contains(word), "{wrong:?}: {fault}");
        }
    }
}
