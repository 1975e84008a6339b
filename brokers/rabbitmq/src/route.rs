//! From an event to the exchange and the routing key it is published with.
//!
//! A routing key is a path of words with dots between them. The topic may bring several words;
//! every other field is one, so that a tenant called `a.b` does not end up below the tenant `a`.

use std::fmt;
use std::str::FromStr;

use postbox_core::{Event, Outcome};

use crate::message::SHORT_BYTES_MAX;

/// The code of an event that no exchange or routing key can be made of.
const INVALID: &str = "route_invalid";
/// What begins so belongs to the server: its own exchanges and queues, and replies to others.
const SERVERS_OWN: &str = "amq.";

/// `orders.{topic}.{key}`: literal text and fields of the event.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RouteTemplate {
    /// What comes before the first field.
    prefix: String,
    /// Each field, with the text behind it.
    fields: Vec<(Field, String)>,
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

impl FromStr for RouteTemplate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split('{');
        let prefix = parts.next().unwrap_or_default().to_owned();
        let field = |part: &str| {
            let (name, behind) = part.split_once('}').ok_or_else(|| format!("{text:?} has a {{ without a }}"))?;
            let field = FIELDS.iter().find(|(known, _)| *known == name).ok_or_else(|| {
                format!("{{{name}}} is no field; write {{topic}}, {{key}}, {{kind}}, {{aggregate}} or {{tenant}}")
            })?;
            Ok((field.1, behind.to_owned()))
        };
        let template = Self { prefix, fields: parts.map(field).collect::<Result<_, String>>()? };
        let between = &template.fields[..template.fields.len().saturating_sub(1)];
        if let Some((field, _)) = between.iter().find(|(_, behind)| behind.is_empty()) {
            return Err(format!("nothing stands behind {{{}}} to end it; write a \".\" there", field.name()));
        }
        let literal: String = template.with(|_| "");
        match literal.len() {
            0..=SHORT_BYTES_MAX if !literal.contains(char::is_control) => Ok(template),
            _ => Err(format!("{text:?} has a control character, or more than {SHORT_BYTES_MAX} bytes")),
        }
    }
}

impl fmt::Display for RouteTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.with(|field| format!("{{{}}}", field.name())))
    }
}

impl RouteTemplate {
    /// What it always is, if it has no fields.
    pub(crate) fn fixed(&self) -> Option<&str> {
        self.fields.is_empty().then_some(&self.prefix)
    }

    /// The route of an event. The error is [`Outcome::Dead`]: the event will never have one.
    pub(crate) fn render(&self, event: &Event) -> Result<String, Outcome> {
        let mut route = self.prefix.clone();
        for (field, behind) in &self.fields {
            route += value(*field, behind, event)?;
            route += behind;
        }
        let fault = match () {
            () if route.len() > SHORT_BYTES_MAX => {
                format!("it would have {} bytes; AMQP allows {SHORT_BYTES_MAX}", route.len())
            }
            () if route.contains(char::is_control) => "a control character".to_owned(),
            () if route.starts_with(SERVERS_OWN) && !self.prefix.starts_with(SERVERS_OWN) => {
                format!("what begins with {SERVERS_OWN} is the server's own")
            }
            () => return Ok(route),
        };
        Err(Outcome::dead(INVALID, format!("no exchange or routing key can be made of the event: {fault}")))
    }

    fn with<T: AsRef<str>>(&self, value: impl Fn(Field) -> T) -> String {
        let fields = self.fields.iter().map(|(field, behind)| value(*field).as_ref().to_owned() + behind);
        self.prefix.clone() + &fields.collect::<String>()
    }
}

/// The value of a field, with `behind` after it.
fn value<'a>(field: Field, behind: &str, event: &'a Event) -> Result<&'a str, Outcome> {
    let name = field.name();
    let fault = match field.of(event) {
        None | Some("") => format!("the event has no {name}, which the sink's exchange or routing key names"),
        Some(value) if field != Field::Topic && value.contains('.') => {
            format!("the event's {name} has a dot and would be several words; leave {{{name}}} out")
        }
        // A topic is several words anyway.
        Some(value) if !behind.is_empty() && !behind.starts_with('.') && value.contains(behind) => {
            format!("the event's {name} holds {behind:?}, which ends it in the exchange or routing key")
        }
        Some(value) => return Ok(value),
    };
    Err(Outcome::dead(INVALID, fault))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use postbox_core::{EventId, NewEvent};

    use super::*;

    fn render(template: &str, event: NewEvent) -> Result<String, Outcome> {
        let event = event.into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
        template.parse::<RouteTemplate>().expect("a template").render(&event)
    }

    #[test]
    fn fields_of_the_event_stand_in_the_route() {
        let paid = || NewEvent::json("order.paid", "").key("42").aggregate("order").tenant("acme");
        for (template, route) in [
            ("", ""),
            ("amq.topic", "amq.topic"),
            ("{topic}", "order.paid"),
            ("a.{tenant}.{topic}.{key}.z", "a.acme.order.paid.42.z"),
            ("{kind}-{aggregate}", "domain-order"),
        ] {
            assert_eq!(render(template, paid()).as_deref(), Ok(route));
            assert_eq!(template.parse::<RouteTemplate>().expect("a template").to_string(), template);
        }
    }

    #[test]
    fn no_hostile_value_becomes_another_route() {
        for value in ["", "a\tb", "a\r\n", "\0", "amq.direct", "amq.rabbitmq.reply-to.x", &"t".repeat(256)] {
            let dead = render("{topic}", NewEvent::json(value, "")).expect_err(value);
            assert!(matches!(&dead, Outcome::Dead { code, .. } if code == INVALID), "{value:?}: {dead:?}");
        }
        // Wildcards mean something in a binding; in a routing key they are themselves.
        assert_eq!(render("{topic}", NewEvent::json("#", "")).as_deref(), Ok("#"));
        let of = |tenant: &str| NewEvent::json("t", "").tenant(tenant).key("k");
        assert!(render("x.{tenant}", of("a.b")).is_err(), "one word a tenant");
        assert!(render("{tenant}-{key}", of("a-b")).is_err(), "tenant a with key b-k");
        assert!(render("x.{aggregate}", of("a")).is_err(), "no aggregate");
    }

    #[test]
    fn a_template_is_checked_where_it_is_written() {
        for wrong in ["{what}", "{topic", "{}", "{topic}{key}", "a\nb", &"a".repeat(256)] {
            assert!(wrong.parse::<RouteTemplate>().is_err(), "{wrong:?}");
        }
    }
}
