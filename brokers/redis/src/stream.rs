//! The name of the stream an event goes to.

use std::borrow::Cow;
use std::str::FromStr;

use postbox_core::{Event, Outcome};

/// Names of streams, made of the fields of an event: `events:{topic}`.
///
/// `{{` and `}}` stand for braces. Different events never meet in one stream by accident: a value
/// that holds the text which ends it in the template is refused, so that tenant `a` with topic
/// `b:c` is not tenant `a:b` with topic `c`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamTemplate {
    /// What comes before the first placeholder.
    prefix: String,
    /// Each placeholder, with the text behind it.
    parts: Vec<(Placeholder, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placeholder {
    Topic,
    Key,
    Kind,
    Aggregate,
    Tenant,
}

/// Their names, in the order of the documentation.
const PLACEHOLDERS: [(&str, Placeholder); 5] = [
    ("topic", Placeholder::Topic),
    ("key", Placeholder::Key),
    ("kind", Placeholder::Kind),
    ("aggregate", Placeholder::Aggregate),
    ("tenant", Placeholder::Tenant),
];

impl Placeholder {
    fn name(self) -> &'static str {
        PLACEHOLDERS.iter().find(|(_, it)| *it == self).map_or("", |(name, _)| name)
    }

    fn value(self, event: &Event) -> Option<&str> {
        match self {
            Self::Topic => Some(event.topic.as_str()),
            Self::Key => event.key.as_ref().map(AsRef::as_ref),
            Self::Kind => Some(event.kind()),
            Self::Aggregate => event.aggregate.as_deref(),
            Self::Tenant => event.tenant.as_ref().map(AsRef::as_ref),
        }
    }
}

impl StreamTemplate {
    /// The stream of an event. An event that lacks a field, or whose name would be another's, is
    /// dead.
    pub(crate) fn name(&self, event: &Event) -> Result<Cow<'_, str>, Outcome> {
        if self.parts.is_empty() {
            return Ok(Cow::Borrowed(&self.prefix));
        }
        let mut name = self.prefix.clone();
        for (placeholder, behind) in &self.parts {
            let field = placeholder.name();
            let Some(value) = placeholder.value(event).filter(|value| !value.is_empty()) else {
                return Err(Outcome::dead(
                    "stream_field_missing",
                    format!("the stream's name needs the event's {field}, and it has none"),
                ));
            };
            if !behind.is_empty() && value.contains(behind.as_str()) {
                return Err(Outcome::dead(
                    "stream_name_ambiguous",
                    format!("the event's {field} holds {behind:?}, which ends it in the stream's name"),
                ));
            }
            name.push_str(value);
            name.push_str(behind);
        }
        Ok(Cow::Owned(name))
    }
}

impl FromStr for StreamTemplate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut template = Self { prefix: String::new(), parts: Vec::new() };
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            let (before, brace) = rest.split_at(at);
            template.literal(before);
            rest = if let Some(after) = brace.strip_prefix("{{").or_else(|| brace.strip_prefix("}}")) {
                template.literal(&brace[..1]);
                after
            } else {
                let named = brace.strip_prefix('{').and_then(|inner| inner.split_once('}'));
                let (name, after) = named
                    .ok_or_else(|| format!("{text:?} has a brace without its other; write {{{{ or }}}} for one"))?;
                template.placeholder(name)?;
                after
            };
        }
        template.literal(rest);
        match text {
            "" => Err("is empty; write the name of a stream, e.g. \"events:{topic}\"".to_owned()),
            _ => Ok(template),
        }
    }
}

impl StreamTemplate {
    fn literal(&mut self, text: &str) {
        self.parts.last_mut().map_or(&mut self.prefix, |(_, behind)| behind).push_str(text);
    }

    fn placeholder(&mut self, name: &str) -> Result<(), String> {
        let Some((_, placeholder)) = PLACEHOLDERS.iter().find(|(known, _)| *known == name) else {
            let known: Vec<&str> = PLACEHOLDERS.iter().map(|(known, _)| *known).collect();
            return Err(format!("{{{name}}} is no placeholder; there are {{{}}}", known.join("}, {")));
        };
        if self.parts.last().is_some_and(|(_, behind)| behind.is_empty()) {
            return Err(format!(
                "nothing stands before {{{name}}} to end the placeholder before it; write a \":\" there"
            ));
        }
        self.parts.push((*placeholder, String::new()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use postbox_core::{EventId, NewEvent};

    use super::*;

    fn name(template: &str, event: NewEvent) -> Result<String, String> {
        let event = event.into_event(EventId::now_v7(), jiff::Timestamp::UNIX_EPOCH);
        let template: StreamTemplate = template.parse().expect("a template");
        template.name(&event).map(Cow::into_owned).map_err(|outcome| match outcome {
            Outcome::Dead { code, .. } => code.into_owned(),
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn names_are_made_of_the_event() {
        let event = || NewEvent::json("order.paid", "{}").key("42").tenant("t1").aggregate("order");
        for (template, expected) in [
            ("events", "events"),
            ("events:{topic}", "events:order.paid"),
            ("{tenant}/{kind}:{aggregate}-{key}!", "t1/domain:order-42!"),
            ("{{{tenant}}}:{topic}", "{t1}:order.paid"),
        ] {
            assert_eq!(name(template, event()).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn no_two_ways_lead_to_one_name() {
        let event = |tenant: &str, topic: &str| NewEvent::json(topic, "{}").tenant(tenant);
        assert_eq!(name("{tenant}:{topic}", event("a", "b:c")).as_deref(), Ok("a:b:c"));
        assert_eq!(name("{tenant}:{topic}", event("a:b", "c")), Err("stream_name_ambiguous".into()));
        assert_eq!(name("{tenant}:{topic}", NewEvent::json("t", "{}")), Err("stream_field_missing".into()));
        assert_eq!(name("events:{key}", NewEvent::json("t", "{}")), Err("stream_field_missing".into()));
    }

    #[test]
    fn mistakes_are_named() {
        for (template, word) in [
            ("", "empty"),
            ("{topik}", "{topik} is no placeholder"),
            ("{topic}{key}", "before {key}"),
            ("a{", "brace"),
            ("a}", "brace"),
            ("a{topic", "brace"),
        ] {
            let fault = template.parse::<StreamTemplate>().expect_err("refused");
            assert!(fault.contains(word), "{template}: {fault}");
        }
    }
}
