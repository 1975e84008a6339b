//! Text with fields of an event: where a sink publishes to.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::event::Event;
use crate::outcome::Outcome;

/// Text with fields of an event, e.g. `orders.{topic}.{key}`; `{{` and `}}` stand for braces.
///
/// The broker it is for sets the rules for the text and for the values of its fields.
///
/// ```
/// use postbox_core::Template;
///
/// let template: Template = "orders.{topic}".parse()?;
/// assert_eq!(template.fill(|_field, _between| Ok("paid"))?, "orders.paid");
/// # Ok::<(), postbox_core::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Template {
    /// The text before the first field.
    prefix: String,
    /// Each field, with the text that follows it.
    fields: Vec<(Field, String)>,
}

/// A field of which an event has at most one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// [`Event::topic`].
    Topic,
    /// [`Event::key`].
    Key,
    /// [`Event::kind()`].
    Kind,
    /// [`Event::aggregate`].
    Aggregate,
    /// [`Event::tenant`].
    Tenant,
}

impl Field {
    const ALL: [Self; 5] = [Self::Topic, Self::Key, Self::Kind, Self::Aggregate, Self::Tenant];

    /// Returns its name, as it is written between braces.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Topic => "topic",
            Self::Key => "key",
            Self::Kind => "kind",
            Self::Aggregate => "aggregate",
            Self::Tenant => "tenant",
        }
    }

    /// Returns the event's value, empty if it has none.
    pub fn of(self, event: &Event) -> &str {
        match self {
            Self::Topic => event.topic.as_str(),
            Self::Key => event.key.as_ref().map_or("", |key| key.as_str()),
            Self::Kind => event.kind(),
            Self::Aggregate => event.aggregate.as_deref().unwrap_or_default(),
            Self::Tenant => event.tenant.as_ref().map_or("", |tenant| tenant.as_str()),
        }
    }
}

impl Template {
    /// Returns the text with a value for each field. `value` also gets the text between its field
    /// and the next one; for the last field it is empty.
    pub fn fill<'v, E>(&self, value: impl Fn(Field, &str) -> Result<&'v str, E>) -> Result<String, E> {
        let mut text = self.prefix.clone();
        for (nth, (field, behind)) in (1..).zip(&self.fields) {
            let between = if nth < self.fields.len() { behind } else { "" };
            text.push_str(value(*field, between)?);
            text.push_str(behind);
        }
        Ok(text)
    }

    /// Returns the text, if it has no fields.
    pub fn fixed(&self) -> Option<&str> {
        self.fields.is_empty().then_some(&self.prefix)
    }

    /// Returns two fields with nothing between them. There, the end of the first value is
    /// ambiguous.
    fn adjacent(&self) -> Option<(Field, Field)> {
        let mut pairs = self.fields.iter().zip(self.fields.iter().skip(1));
        pairs.find(|((_, between), _)| between.is_empty()).map(|((first, _), (second, _))| (*first, *second))
    }

    fn push_str(&mut self, literal: &str) {
        self.fields.last_mut().map_or(&mut self.prefix, |(_, behind)| behind).push_str(literal);
    }
}

/// What a broker asks of a name that a template makes.
///
/// Different events must not get the same name by accident, because permissions and tenants are
/// often separated by names: with `{tenant}-{topic}`, tenant `a` with topic `b-c`, and tenant `a-b`
/// with topic `c`. So a value is refused if the text between its field and the next would be found
/// before its end. What follows the last field is the same in every name.
#[derive(Debug, Clone, Copy)]
pub struct NameRules {
    /// What is named, e.g. `topic`.
    pub what: &'static str,
    /// The code of an event that no name can be made of.
    pub code: &'static str,
    /// Separates the parts of a name. A topic may have several, every other field must be one part:
    /// a tenant called `a.b` must not end up below the tenant `a`.
    pub separator: Option<char>,
    /// Checks a name. The error says what is wrong, and does not repeat the name.
    pub check: fn(&str) -> Result<(), String>,
}

impl NameRules {
    /// Parses a template of names. The error is for a person.
    pub fn parse(&self, text: &str) -> Result<Template, String> {
        let template: Template = text.parse().map_err(|error: Error| error.message().to_owned())?;
        if let Some((first, second)) = template.adjacent() {
            let (first, second) = (first.as_str(), second.as_str());
            return Err(format!("nothing separates {{{first}}} from {{{second}}}; write a character between them"));
        }
        // With a plain value for each field, the result must be a name.
        let plain = template.fill(|_, _| Ok("x")).and_then(|name| (self.check)(&name));
        plain.map(|()| template).map_err(|fault| format!("{text:?} is not a valid {}: {fault}", self.what))
    }

    /// Returns the name for an event. The error is [`Outcome::Dead`]: the event will never have
    /// one.
    pub fn name(&self, template: &Template, event: &Event) -> Result<String, Outcome> {
        let dead = |fault: String| Outcome::dead(self.code, fault);
        let name = template.fill(|field, between| self.value(field, between, event).map_err(dead))?;
        (self.check)(&name).map_err(|fault| dead(format!("the event gives no valid {}: {fault}", self.what)))?;
        Ok(name)
    }

    /// Returns the value of a field, with `between` before the next one.
    fn value<'e>(&self, field: Field, between: &str, event: &'e Event) -> Result<&'e str, String> {
        let (name, what) = (field.as_str(), self.what);
        let is_path = |value: &str| self.separator.is_some_and(|separator| value.contains(separator));
        match field.of(event) {
            "" => Err(format!("the event has no {name}, which the sink's {what} names")),
            value if field != Field::Topic && is_path(value) => Err(format!(
                "the event's {name} has a separator and would be several parts; leave {{{name}}} out of the {what}"
            )),
            // The next field is a part of its own.
            value if between.is_empty() || self.separator.is_some_and(|separator| between.starts_with(separator)) => {
                Ok(value)
            }
            // The end of the value and the text behind it may form that text: `a_` before `__`.
            value if format!("{value}{between}").find(between) == Some(value.len()) => Ok(value),
            _ => Err(format!("the event's {name} holds {between:?}, which ends it in the sink's {what}")),
        }
    }
}

impl FromStr for Template {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = |fault: String| Error::invalid("read template", "template_invalid", fault);
        let mut template = Self::default();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            let (before, brace) = rest.split_at(at);
            template.push_str(before);
            if let Some(after) = brace.strip_prefix("{{").or_else(|| brace.strip_prefix("}}")) {
                template.push_str(&brace[..1]);
                rest = after;
                continue;
            }
            let (name, after) = brace.strip_prefix('{').and_then(|inner| inner.split_once('}')).ok_or_else(|| {
                invalid(format!("{text:?} has a brace without its other; write {{{{ or }}}} for one"))
            })?;
            let field = Field::ALL.into_iter().find(|field| field.as_str() == name).ok_or_else(|| {
                let known = "{topic}, {key}, {kind}, {aggregate} or {tenant}";
                invalid(format!("{{{name}}} is no field; write {known}"))
            })?;
            template.fields.push((field, String::new()));
            rest = after;
        }
        template.push_str(rest);
        Ok(template)
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let escaped = |literal: &str| literal.replace('{', "{{").replace('}', "}}");
        f.write_str(&escaped(&self.prefix))?;
        self.fields.iter().try_for_each(|(field, behind)| write!(f, "{{{}}}{}", field.as_str(), escaped(behind)))
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::event::{EventId, NewEvent};

    fn template(text: &str) -> Template {
        text.parse().expect("a template")
    }

    #[test]
    fn fields_of_the_event_stand_in_the_text() {
        let paid = NewEvent::json("order.paid", "").key("łódź").aggregate("order").tenant("acme");
        let paid = paid.into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
        for (written, text) in [
            ("", ""),
            ("orders", "orders"),
            ("{topic}", "order.paid"),
            ("a.{tenant}.{topic}.{key}.z", "a.acme.order.paid.łódź.z"),
            ("{tenant}/{kind}:{aggregate}-{key}!", "acme/domain:order-łódź!"),
            ("zażółć.{key}{kind}", "zażółć.łódźdomain"),
            ("{{{tenant}}}:{topic}", "{acme}:order.paid"),
            ("a}}b{{topic}}", "a}b{topic}"),
        ] {
            assert_eq!(template(written).fill(|field, _| Ok::<_, Error>(field.of(&paid))).expect("no error"), text);
            assert_eq!(template(written).to_string(), written);
        }
    }

    #[test]
    fn a_value_is_asked_for_with_the_text_before_the_next() {
        let asked = std::cell::RefCell::new(Vec::new());
        let refused = template("a{topic}-.{key}b{tenant}").fill(|field, between| {
            asked.borrow_mut().push((field, between.to_owned()));
            if field == Field::Key { Err("refused") } else { Ok("") }
        });
        assert_eq!(refused, Err("refused"));
        assert_eq!(asked.into_inner(), [(Field::Topic, "-.".to_owned()), (Field::Key, "b".to_owned())]);
    }

    #[test]
    fn without_a_field_the_text_is_fixed() {
        for (written, fixed) in [("", Some("")), ("{{a}}", Some("{a}")), ("{topic}", None), ("a.{topic}", None)] {
            assert_eq!(template(written).fixed(), fixed, "{written}");
        }
    }

    #[test]
    fn what_an_event_lacks_is_empty() {
        let bare = NewEvent::json("t", "").into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
        assert_eq!(Field::ALL.map(|field| field.of(&bare)), ["t", "", "domain", "", ""]);
    }

    #[test]
    fn fields_with_nothing_between_them_are_found() {
        assert_eq!(template("{topic}-{tenant}{key}").adjacent(), Some((Field::Tenant, Field::Key)));
        for apart in ["", "a", "{topic}", "{topic}.{key}", "{topic}}}{key}"] {
            assert_eq!(template(apart).adjacent(), None, "{apart}");
        }
    }

    #[test]
    fn no_two_ways_lead_to_one_name() {
        let check = |name: &str| if name.contains('!') { Err("an exclamation mark".to_owned()) } else { Ok(()) };
        let flat = NameRules { what: "topic", code: "topic_invalid", separator: None, check };
        let path = NameRules { separator: Some('.'), ..flat };
        let name = |rules: NameRules, template: &str, tenant: &str, topic: &str| {
            let event = NewEvent::json(topic, "").tenant(tenant).into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
            rules.name(&rules.parse(template).expect("a template"), &event)
        };
        for (rules, template) in [(flat, "{tenant}.{topic}"), (flat, "{tenant}-{topic}"), (path, "{tenant}-{topic}")] {
            let between = &template[8..9];
            let both = format!("b{between}c");
            assert_eq!(name(rules, template, "a", &both), Ok(format!("a{between}{both}")), "{template}");
            let dead = name(rules, template, &format!("a{between}b"), "c").expect_err(template);
            assert!(matches!(&dead, Outcome::Dead { code, .. } if code == "topic_invalid"), "{dead:?}");
        }
        for between in ["__", "--", "::"] {
            let (half, template) = (&between[..1], format!("{{tenant}}{between}{{topic}}"));
            assert!(name(flat, &template, &format!("acme{half}"), "x").is_err(), "{template}");
            let ends = format!("{half}x");
            assert_eq!(name(flat, &template, "acme", &ends), Ok(format!("acme{between}{ends}")), "{template}");
        }
        assert_eq!(name(flat, "{topic}.v1", "t", "a.v1.b").as_deref(), Ok("a.v1.b.v1"), "every name ends with it");
        assert_eq!(name(path, "{topic}.{tenant}", "a", "b.c").as_deref(), Ok("b.c.a"), "a topic has several parts");
        assert!(name(path, "x.{tenant}", "a.b", "t").is_err(), "one part a tenant");
        assert_eq!(name(flat, "x.{tenant}", "a.b", "t").as_deref(), Ok("x.a.b"), "no parts, no rule");
        assert!(name(path, "x.{key}", "a", "t").is_err(), "no key");
        assert!(name(path, "{topic}", "a", "t!").is_err(), "the broker's own check");
        assert!(flat.parse("{topic}!").is_err(), "it is checked where it is written");
        for (wrong, word) in [("{tenant}{topic}", "between them"), ("{topik}", "no field"), ("a}", "brace")] {
            let fault = path.parse(wrong).expect_err("refused");
            assert!(fault.contains(word), "{fault}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (wrong, fault) in [
            ("{topik}", "{topik} is no field; write {topic}, {key}, {kind}, {aggregate} or {tenant}"),
            ("{}", "{} is no field"),
            ("{ topic}", "{ topic} is no field"),
            ("{a{topic}", "{a{topic} is no field"),
            ("a{", "brace without its other"),
            ("a}", "brace without its other"),
            ("a{topic", "brace without its other"),
            ("{topic}}", "brace without its other"),
            ("{{topic}", "brace without its other"),
        ] {
            let error = wrong.parse::<Template>().expect_err("refused");
            assert_eq!(error.code(), "template_invalid");
            assert!(error.message().contains(fault), "{wrong}: {error}");
        }
    }
}
