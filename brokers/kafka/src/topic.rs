//! From an event to the topic it is published to: a template, and what no topic may be.

use std::fmt;
use std::str::FromStr;

use postbox_core::{Event, Outcome};

/// Longest name of a topic.
const NAME_BYTES_MAX: usize = 249;

/// The code of an event that no topic can be made of.
const INVALID: &str = "topic_invalid";

/// `orders.{topic}`: literal text and fields of the event.
///
/// Different events never meet in one topic by accident: a value that holds the text which ends it
/// in the template is refused, so that tenant `a` with topic `b.c` is not tenant `a.b` with topic
/// `c`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TopicTemplate {
    /// What comes before the first field.
    prefix: String,
    /// Each field, with the text behind it.
    parts: Vec<(Field, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Topic,
    Key,
    Kind,
    Aggregate,
    Tenant,
}

const FIELDS: [(&str, Field); 5] = [
    ("topic", Field::Topic),
    ("key", Field::Key),
    ("kind", Field::Kind),
    ("aggregate", Field::Aggregate),
    ("tenant", Field::Tenant),
];

impl Field {
    fn of(self, event: &Event) -> Option<&str> {
        match self {
            Self::Topic => Some(event.topic.as_str()),
            Self::Key => event.key.as_ref().map(|key| key.as_str()),
            Self::Kind => Some(event.kind()),
            Self::Aggregate => event.aggregate.as_deref(),
            Self::Tenant => event.tenant.as_ref().map(|tenant| tenant.as_str()),
        }
    }

    fn name(self) -> &'static str {
        FIELDS.iter().find(|(_, field)| *field == self).map_or("", |(name, _)| name)
    }
}

impl FromStr for TopicTemplate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut pieces = text.split('{');
        let mut template = Self { prefix: pieces.next().unwrap_or_default().to_owned(), parts: Vec::new() };
        for piece in pieces {
            let (name, behind) = piece.split_once('}').ok_or_else(|| format!("{text:?} has a {{ without a }}"))?;
            let (name, field) = FIELDS.iter().find(|(known, _)| *known == name).ok_or_else(|| {
                format!("{{{name}}} is no field; write {{topic}}, {{key}}, {{kind}}, {{aggregate}} or {{tenant}}")
            })?;
            if template.parts.last().is_some_and(|(_, behind)| behind.is_empty()) {
                return Err(format!(
                    "nothing stands before {{{name}}} to end the field before it; write a \".\" there"
                ));
            }
            template.parts.push((*field, behind.to_owned()));
        }
        // With a plain value in each place it must be a topic.
        check(&template.with(|_| "x".to_owned())).map_err(|fault| format!("{text:?} is no topic: {fault}"))?;
        Ok(template)
    }
}

impl fmt::Display for TopicTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.with(|field| format!("{{{}}}", field.name())))
    }
}

impl TopicTemplate {
    /// The topic of an event. The error is [`Outcome::Dead`]: the event will never have one.
    pub fn render(&self, event: &Event) -> Result<String, Outcome> {
        let mut topic = self.prefix.clone();
        for (field, behind) in &self.parts {
            let name = field.name();
            let Some(value) = field.of(event).filter(|value| !value.is_empty()) else {
                return Err(Outcome::dead(INVALID, format!("the event has no {name}, which the sink's topic names")));
            };
            if !behind.is_empty() && value.contains(behind.as_str()) {
                let text = format!("the event's {name} holds {behind:?}, which ends it in the sink's topic");
                return Err(Outcome::dead(INVALID, text));
            }
            topic.push_str(value);
            topic.push_str(behind);
        }
        check(&topic).map_err(|fault| Outcome::dead(INVALID, format!("no topic can be made of the event: {fault}")))?;
        Ok(topic)
    }

    /// The one topic that it can be, if the event does not matter.
    pub fn fixed(&self) -> Option<&str> {
        self.parts.is_empty().then_some(&self.prefix)
    }

    fn with(&self, value: impl Fn(Field) -> String) -> String {
        let parts = self.parts.iter().map(|(field, behind)| value(*field) + behind);
        std::iter::once(self.prefix.clone()).chain(parts).collect()
    }
}

/// What is wrong with a topic. The text does not repeat it.
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
        template.parse::<TopicTemplate>().expect("a template").render(&event)
    }

    #[test]
    fn fields_of_the_event_stand_in_the_topic() {
        let paid = || NewEvent::json("order.paid", "").key("42").aggregate("order").tenant("acme");
        for (template, topic) in [
            ("orders", "orders"),
            ("{topic}", "order.paid"),
            ("a.{tenant}.{topic}", "a.acme.order.paid"),
            ("{kind}_{aggregate}-{key}.z", "domain_order-42.z"),
        ] {
            assert_eq!(render(template, paid()).as_deref(), Ok(topic));
            assert_eq!(template.parse::<TopicTemplate>().expect("a template").to_string(), template);
        }
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
            ("{topic", "without"),
            ("topic}", "letters"),
            ("{tenant}{topic}", "before {topic}"),
            ("..", "no names"),
        ] {
            let fault = wrong.parse::<TopicTemplate>().expect_err("a fault");
            assert!(fault.contains(word), "{wrong:?}: {fault}");
        }
    }
}
