//! The topic that an event is published to: a template, and what no topic may contain.

use postbox_core::template::NameRules;

/// The longest text, in bytes: the protocol writes its length in two bytes.
pub(crate) const TEXT_BYTES_MAX: usize = 65_535;

/// Levels are separated by slashes.
pub(crate) const RULES: NameRules = NameRules { what: "topic", code: "topic_invalid", separator: Some('/'), check };

/// Checks a topic filter, for a subscription.
pub(crate) fn filter(text: &str) -> Result<String, String> {
    let level = |level: &str| level == "+" || !level.contains(['+', '#']);
    let levels = text.strip_suffix("/#").unwrap_or(if text == "#" { "" } else { text });
    let fault = match () {
        () if text.starts_with("$share/") => "the group of a shared subscription goes into the key share".to_owned(),
        () if text.is_empty() => "it is empty".to_owned(),
        () if !levels.split('/').all(level) => "+ must be a whole level, and # the last one".to_owned(),
        () => match check_text(text) {
            Ok(()) => return Ok(text.to_owned()),
            Err(fault) => fault,
        },
    };
    Err(format!("{text:?} is not a valid topic filter: {fault}"))
}

/// Returns what is wrong with a topic to publish to. The text does not repeat the topic.
fn check(topic: &str) -> Result<(), String> {
    match () {
        () if topic.is_empty() => Err("it is empty".to_owned()),
        () if topic.contains(['+', '#']) => Err("+ and # are wildcards".to_owned()),
        () if topic.starts_with('$') => Err("what begins with $ belongs to the server".to_owned()),
        () => check_text(topic),
    }
}

/// Returns what is wrong with a text of the protocol. A server may end the connection because of a
/// control character, and must because of NUL.
pub(crate) fn check_text(text: &str) -> Result<(), String> {
    let is_no_character = |c: char| matches!(c, '\u{fdd0}'..='\u{fdef}') || u32::from(c) & 0xfffe == 0xfffe;
    match () {
        () if text.len() > TEXT_BYTES_MAX => {
            Err(format!("it would have {} bytes; at most {TEXT_BYTES_MAX} are allowed", text.len()))
        }
        () if text.chars().any(|c| c.is_control() || is_no_character(c)) => Err("a control character".to_owned()),
        () => Ok(()),
    }
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
        let long = "t".repeat(TEXT_BYTES_MAX + 1);
        for value in ["", "a\0b", "a\tb", "\u{85}", "\u{ffff}", "+", "a/+", "#", "a/#", "a+b", "$SYS/x", &long] {
            let dead = render("{topic}", NewEvent::json(value, "")).expect_err(value);
            assert!(matches!(&dead, Outcome::Dead { code, .. } if code == RULES.code), "{value:?}: {dead:?}");
        }
        let event = |tenant: &str| NewEvent::json("order.paid", "").tenant(tenant);
        assert_eq!(render("in/{tenant}/{topic}", event("łódź 1")).as_deref(), Ok("in/łódź 1/order.paid"));
        assert!(render("in/{tenant}/{topic}", event("a/b")).is_err(), "one level a tenant");
        assert!(render("in/{topic}", NewEvent::json("$SYS/x", "")).is_ok(), "harmless behind a level");
        assert_eq!(render("{topic}", NewEvent::json("a/b", "")).as_deref(), Ok("a/b"));
    }

    #[test]
    fn a_template_and_a_filter_are_checked_where_they_are_written() {
        for wrong in ["", "a/+", "#", "$SYS/{topic}", "a\tb"] {
            assert!(RULES.parse(wrong).is_err(), "{wrong:?}");
        }
        for right in ["a", "a/+/c", "+", "#", "a/#", "+/+/#", "/a", "a//b"] {
            assert_eq!(filter(right).as_deref(), Ok(right));
        }
        for wrong in ["", "a#", "#/a", "a/b+", "a/#/b", "$share/g/a", "a\0"] {
            assert!(filter(wrong).is_err(), "{wrong:?}");
        }
    }
}
