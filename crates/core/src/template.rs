//! Text with fields of an event: where a sink publishes to.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::event::Event;

/// Text with fields of an event, e.g. `orders.{topic}.{key}`; `{{` and `}}` stand for braces.
///
/// The broker it is for sets the rules for the text and for the values of its fields.
///
/// ```
/// use postbox_core::Template;
///
/// let template: Template = "orders.{topic}".parse()?;
/// assert_eq!(template.fill(|_field, _behind| Ok("paid"))?, "orders.paid");
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
    /// Returns the text with a value for each field. `value` also gets the text that follows the
    /// field.
    pub fn fill<'v, E>(&self, value: impl Fn(Field, &str) -> Result<&'v str, E>) -> Result<String, E> {
        let mut text = self.prefix.clone();
        for (field, behind) in &self.fields {
            text.push_str(value(*field, behind)?);
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
    pub fn adjacent(&self) -> Option<(Field, Field)> {
        let mut pairs = self.fields.iter().zip(self.fields.iter().skip(1));
        pairs.find(|((_, between), _)| between.is_empty()).map(|((first, _), (second, _))| (*first, *second))
    }

    fn push_str(&mut self, literal: &str) {
        self.fields.last_mut().map_or(&mut self.prefix, |(_, behind)| behind).push_str(literal);
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
    fn a_value_is_asked_for_with_the_text_behind_it() {
        let asked = std::cell::RefCell::new(Vec::new());
        let refused = template("a{topic}-.{key}b{tenant}").fill(|field, behind| {
            asked.borrow_mut().push((field, behind.to_owned()));
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
