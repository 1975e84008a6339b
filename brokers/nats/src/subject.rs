//! From an event to the subject it is published to: a template, and what no subject may be.
//!
//! A subject is a path of tokens with dots between them. The topic may bring several tokens; every
//! other field is one, so that a tenant called `a.b` does not end up below the tenant `a`.

use std::fmt;
use std::str::FromStr;

use postbox_core::{Event, Outcome};

/// Longest subject. A server takes 4 KiB for a whole protocol line by default, and file names and
/// permissions are made of subjects.
const SUBJECT_BYTES_MAX: usize = 1_024;

/// The code of an event that no subject can be made of.
const INVALID: &str = "subject_invalid";

/// `orders.{topic}.{key}`: literal text and fields of the event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubjectTemplate {
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Field(Field),
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

impl FromStr for SubjectTemplate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('{') {
            let (name, behind) = after.split_once('}').ok_or_else(|| format!("{text:?} has a {{ without a }}"))?;
            let field = FIELDS.iter().find(|(known, _)| *known == name).ok_or_else(|| {
                format!("{{{name}}} is no field; write {{topic}}, {{key}}, {{kind}}, {{aggregate}} or {{tenant}}")
            })?;
            parts.extend((!before.is_empty()).then(|| Part::Text(before.to_owned())));
            parts.push(Part::Field(field.1));
            rest = behind;
        }
        parts.extend((!rest.is_empty()).then(|| Part::Text(rest.to_owned())));
        let template = Self { parts };
        // With a plain value in each place it must be a subject.
        check(&template.with(|_| "x".to_owned())).map_err(|fault| format!("{text:?} is no subject: {fault}"))?;
        Ok(template)
    }
}

impl fmt::Display for SubjectTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.with(|field| format!("{{{}}}", field.name())))
    }
}

impl Default for SubjectTemplate {
    fn default() -> Self {
        Self { parts: vec![Part::Field(Field::Topic)] }
    }
}

impl SubjectTemplate {
    /// The subject of an event. The error is [`Outcome::Dead`]: the event will never have one.
    pub fn render(&self, event: &Event) -> Result<String, Outcome> {
        let mut subject = String::new();
        for part in &self.parts {
            match part {
                Part::Text(text) => subject.push_str(text),
                Part::Field(field) => subject.push_str(token(*field, event)?),
            }
        }
        check(&subject)
            .map_err(|fault| Outcome::dead(INVALID, format!("no subject can be made of the event: {fault}")))?;
        Ok(subject)
    }

    /// A pattern that every subject of this template matches, for a stream that takes them.
    pub fn pattern(&self) -> String {
        let all = self.with(|_| "*".to_owned());
        let tokens: Vec<&str> = all.split('.').map(|token| if token.contains('*') { "*" } else { token }).collect();
        match self.parts.contains(&Part::Field(Field::Topic)) {
            true => {
                let fixed = tokens.iter().take_while(|token| **token != "*").copied();
                fixed.chain([">"]).collect::<Vec<_>>().join(".")
            }
            false => tokens.join("."),
        }
    }

    fn with(&self, value: impl Fn(Field) -> String) -> String {
        let part = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Field(field) => value(*field),
        };
        self.parts.iter().map(part).collect()
    }
}

/// The value of a field as a part of the subject.
fn token(field: Field, event: &Event) -> Result<&str, Outcome> {
    let name = field.name();
    let dead = |text: String| Err(Outcome::dead(INVALID, text));
    match field.of(event) {
        None | Some("") => dead(format!("the event has no {name}, which the sink's subject names")),
        Some(value) if field != Field::Topic && value.contains('.') => dead(format!(
            "the event's {name} has a dot and would be several tokens; leave {{{name}}} out of the subject"
        )),
        Some(value) => Ok(value),
    }
}

/// What is wrong with a subject to publish to. The text does not repeat it.
fn check(subject: &str) -> Result<(), String> {
    let fault = match () {
        () if subject.len() > SUBJECT_BYTES_MAX => {
            format!("it would have {} bytes; at most {SUBJECT_BYTES_MAX} are allowed", subject.len())
        }
        () if subject.chars().any(|c| c.is_whitespace() || c.is_control()) => {
            "white space or a control character".into()
        }
        () if subject.contains(['*', '>']) => "* and > are wildcards".into(),
        () if subject.split('.').any(str::is_empty) => "a token is empty".into(),
        () if subject.starts_with('$') || subject.starts_with("_INBOX") => {
            "what begins with $ or _INBOX belongs to the server".into()
        }
        () => return Ok(()),
    };
    Err(fault)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use postbox_core::{EventId, NewEvent};

    use super::*;

    fn event(event: NewEvent) -> Event {
        event.into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH)
    }

    fn render(template: &str, new: NewEvent) -> Result<String, Outcome> {
        template.parse::<SubjectTemplate>().expect("a template").render(&event(new))
    }

    #[test]
    fn fields_of_the_event_stand_in_the_subject() {
        let paid = || NewEvent::json("order.paid", "").key("42").aggregate("order").tenant("acme");
        for (template, subject) in [
            ("orders", "orders"),
            ("{topic}", "order.paid"),
            ("a.{tenant}.{topic}.{key}.z", "a.acme.order.paid.42.z"),
            ("{kind}.{aggregate}-{key}", "domain.order-42"),
        ] {
            assert_eq!(render(template, paid()).as_deref(), Ok(subject));
            assert_eq!(template.parse::<SubjectTemplate>().expect("a template").to_string(), template);
        }
        assert_eq!(render("zażółć.{key}", paid().key("łódź")).as_deref(), Ok("zażółć.łódź"));
    }

    #[test]
    fn no_hostile_value_becomes_another_subject() {
        let hostile =
            ["a b", "a\tb", "a\r\nPUB x 0", "\0", "\u{7f}", "\u{2028}", "*", ">", "a.>", "", "a..b", ".a", "a."];
        for value in hostile {
            let dead = render("{topic}", NewEvent::json(value, "")).expect_err(value);
            assert!(matches!(&dead, Outcome::Dead { code, .. } if code == INVALID), "{value:?}: {dead:?}");
            let key = NewEvent::json("t", "").key(value).tenant(value);
            for template in ["x.{key}", "x.{key}.y", "{tenant}.x"] {
                assert!(render(template, key.clone()).is_err(), "{value:?} in {template}");
            }
        }
        for value in ["$JS.API.STREAM.PURGE.x", "$SYS.x", "_INBOX.x.y"] {
            assert!(render("{topic}", NewEvent::json(value, "")).is_err(), "{value}");
            assert!(render("in.{topic}", NewEvent::json(value, "")).is_ok(), "{value} is harmless behind a token");
        }
        assert!(render("x.{tenant}.{topic}", NewEvent::json("t", "").tenant("a.b")).is_err(), "one token a tenant");
        assert!(render("x.{key}", NewEvent::json("t", "")).is_err(), "no key");
        assert!(render("{topic}", NewEvent::json("t".repeat(SUBJECT_BYTES_MAX + 1), "")).is_err());
    }

    #[test]
    fn a_template_is_checked_where_it_is_written() {
        for wrong in ["", "a b", "a..{topic}", ".{topic}", "$JS.{topic}", "{what}", "{topic", "a.*", "a.>", "{}"] {
            assert!(wrong.parse::<SubjectTemplate>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_pattern_takes_every_subject() {
        for (template, pattern) in [
            ("orders", "orders"),
            ("a.{key}.z", "a.*.z"),
            ("a.{topic}.{key}", "a.>"),
            ("{topic}", ">"),
            ("a.k-{key}", "a.*"),
        ] {
            assert_eq!(template.parse::<SubjectTemplate>().expect("a template").pattern(), pattern);
        }
    }
}
