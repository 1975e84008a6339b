//! The exchange and the routing key that an event is published with.
//!
//! A routing key is a path of words separated by dots. The topic may have several words. Every
//! other field must be one, so that a tenant called `a.b` does not end up below the tenant `a`.

use postbox_config::from_core;
use postbox_core::template::Field;
use postbox_core::{Event, Outcome, Template};

use crate::message::SHORT_BYTES_MAX;

/// The code of an event that no exchange or routing key can be made of.
const INVALID: &str = "route_invalid";
/// The prefix of names that belong to the server: its own exchanges and queues, and replies.
const SERVERS_OWN: &str = "amq.";

/// Parses a template of exchanges or routing keys.
pub(crate) fn parse(text: &str) -> Result<Template, String> {
    let template = from_core::<Template>(text)?;
    if let Some((field, _)) = template.adjacent() {
        return Err(format!("nothing stands behind {{{}}} to end it; write a \".\" there", field.as_str()));
    }
    let literal = template.fill(|_, _| Ok::<_, String>(""))?;
    match literal.len() {
        0..=SHORT_BYTES_MAX if !literal.contains(char::is_control) => Ok(template),
        _ => Err(format!("{text:?} has a control character, or more than {SHORT_BYTES_MAX} bytes")),
    }
}

/// Returns the route of an event. The error is [`Outcome::Dead`]: the event will never have one.
pub(crate) fn render(template: &Template, event: &Event) -> Result<String, Outcome> {
    let route = template.fill(|field, behind| value(field, behind, event))?;
    let fault = match () {
        () if route.len() > SHORT_BYTES_MAX => {
            format!("it would have {} bytes; AMQP allows {SHORT_BYTES_MAX}", route.len())
        }
        () if route.contains(char::is_control) => "a control character".to_owned(),
        () if route.starts_with(SERVERS_OWN) && !template.to_string().starts_with(SERVERS_OWN) => {
            format!("what begins with {SERVERS_OWN} is the server's own")
        }
        () => return Ok(route),
    };
    Err(Outcome::dead(INVALID, format!("the event gives no valid exchange or routing key: {fault}")))
}

/// Returns the value of a field that is followed by `behind`.
fn value<'a>(field: Field, behind: &str, event: &'a Event) -> Result<&'a str, Outcome> {
    let name = field.as_str();
    let fault = match field.of(event) {
        "" => format!("the event has no {name}, which the sink's exchange or routing key names"),
        value if field != Field::Topic && value.contains('.') => {
            format!("the event's {name} has a dot and would be several words; leave {{{name}}} out")
        }
        // A topic may have several words.
        value if !behind.is_empty() && !behind.starts_with('.') && value.contains(behind) => {
            format!("the event's {name} holds {behind:?}, which ends it in the exchange or routing key")
        }
        value => return Ok(value),
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
        super::render(&parse(template).expect("a template"), &event)
    }

    #[test]
    fn fields_of_the_event_stand_in_the_route() {
        let paid = || NewEvent::json("order.paid", "").key("42").tenant("acme");
        for (template, route) in [
            ("", ""),
            ("amq.topic", "amq.topic"),
            ("amq.{topic}", "amq.order.paid"),
            ("{tenant}.{topic}.{key}", "acme.order.paid.42"),
        ] {
            assert_eq!(render(template, paid()).as_deref(), Ok(route));
        }
    }

    #[test]
    fn no_hostile_value_becomes_another_route() {
        for value in ["", "a\tb", "a\r\n", "\0", "amq.direct", "amq.rabbitmq.reply-to.x", &"t".repeat(256)] {
            let dead = render("{topic}", NewEvent::json(value, "")).expect_err(value);
            assert!(matches!(&dead, Outcome::Dead { code, .. } if code == INVALID), "{value:?}: {dead:?}");
        }
        // Wildcards have a meaning in a binding, but not in a routing key.
        assert_eq!(render("{topic}", NewEvent::json("#", "")).as_deref(), Ok("#"));
        let of = |tenant: &str| NewEvent::json("t", "").tenant(tenant).key("k");
        assert!(render("x.{tenant}", of("a.b")).is_err(), "one word a tenant");
        assert!(render("{tenant}-{key}", of("a-b")).is_err(), "tenant a with key b-k");
        assert!(render("x.{aggregate}", of("a")).is_err(), "no aggregate");
    }

    #[test]
    fn a_template_is_checked_where_it_is_written() {
        for wrong in ["{what}", "{topic}{key}", "a\nb", &"a".repeat(256)] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
