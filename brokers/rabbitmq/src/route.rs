//! The exchange and the routing key that an event is published with.

use postbox_core::template::NameRules;
use postbox_core::{Event, Outcome, Template};

use crate::message::SHORT_BYTES_MAX;

/// Words are separated by dots.
pub(crate) const RULES: NameRules =
    NameRules { what: "exchange or routing key", code: "route_invalid", separator: Some('.'), check };
/// The prefix of names that belong to the server: its own exchanges and queues, and replies.
const SERVERS_OWN: &str = "amq.";

/// Returns the route of an event. The error is [`Outcome::Dead`]: the event will never have one.
pub(crate) fn render(template: &Template, event: &Event) -> Result<String, Outcome> {
    let route = RULES.name(template, event)?;
    if route.starts_with(SERVERS_OWN) && !template.to_string().starts_with(SERVERS_OWN) {
        let text =
            format!("the event gives no valid {}: what begins with {SERVERS_OWN} is the server's own", RULES.what);
        return Err(Outcome::dead(RULES.code, text));
    }
    Ok(route)
}

/// Returns what is wrong with an exchange or a routing key.
fn check(route: &str) -> Result<(), String> {
    match () {
        () if route.len() > SHORT_BYTES_MAX => {
            Err(format!("it would have {} bytes; AMQP allows {SHORT_BYTES_MAX}", route.len()))
        }
        () if route.contains(char::is_control) => Err("a control character".to_owned()),
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use postbox_core::{EventId, NewEvent};

    use super::*;

    fn render(template: &str, event: NewEvent) -> Result<String, Outcome> {
        let event = event.into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
        super::render(&RULES.parse(template).expect("a template"), &event)
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
            assert!(matches!(&dead, Outcome::Dead { code, .. } if code == RULES.code), "{value:?}: {dead:?}");
        }
        // Wildcards have a meaning in a binding, but not in a routing key.
        assert_eq!(render("{topic}", NewEvent::json("#", "")).as_deref(), Ok("#"));
        assert!(render("x.{tenant}", NewEvent::json("t", "").tenant("a.b")).is_err(), "one word a tenant");
    }

    #[test]
    fn a_template_is_checked_where_it_is_written() {
        for wrong in ["a\nb", &"a".repeat(256)] {
            assert!(RULES.parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
