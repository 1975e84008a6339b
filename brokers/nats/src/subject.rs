//! The subject that an event is published to: a template, and what no subject may contain.

use std::convert::Infallible;

use postbox_core::Template;
use postbox_core::template::{Field, NameRules};

/// The longest subject, in bytes. A server takes 4 KiB for a whole protocol line by default, and
/// subjects become parts of file names and permissions.
const SUBJECT_BYTES_MAX: usize = 1_024;

/// Tokens are separated by dots.
pub(crate) const RULES: NameRules = NameRules { what: "subject", code: "subject_invalid", separator: Some('.'), check };

/// Returns a pattern that every subject of a template matches, for a stream that takes them.
pub(crate) fn pattern(template: &Template) -> String {
    let Ok(all) = template.fill(|field, _| Ok::<_, Infallible>(if field == Field::Topic { ">" } else { "*" }));
    let tokens = all.split('.').map(|token| if token.contains(['*', '>']) { "*" } else { token });
    let tokens: Vec<&str> = match all.contains('>') {
        true => tokens.take_while(|token| *token != "*").chain([">"]).collect(),
        false => tokens.collect(),
    };
    tokens.join(".")
}

/// Returns what is wrong with a subject to publish to. The text does not repeat the subject.
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
    use postbox_core::{EventId, NewEvent, Outcome};

    use super::*;

    fn render(template: &str, new: NewEvent) -> Result<String, Outcome> {
        let event = new.into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
        RULES.name(&RULES.parse(template).expect("a template"), &event)
    }

    #[test]
    fn fields_of_the_event_stand_in_the_subject() {
        let paid = || NewEvent::json("order.paid", "").key("łódź").tenant("acme");
        assert_eq!(render("a.{tenant}.{topic}.{key}", paid()).as_deref(), Ok("a.acme.order.paid.łódź"));
        assert_eq!(render("a-{tenant}.{topic}", paid()).as_deref(), Ok("a-acme.order.paid"), "a part of a token");
    }

    #[test]
    fn no_hostile_value_becomes_another_subject() {
        let hostile =
            ["a b", "a\tb", "a\r\nPUB x 0", "\0", "\u{7f}", "\u{2028}", "*", ">", "a.>", "", "a..b", ".a", "a."];
        for value in hostile {
            let dead = render("{topic}", NewEvent::json(value, "")).expect_err(value);
            assert!(matches!(&dead, Outcome::Dead { code, .. } if code == RULES.code), "{value:?}: {dead:?}");
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
        assert!(render("{topic}", NewEvent::json("t".repeat(SUBJECT_BYTES_MAX + 1), "")).is_err());
    }

    #[test]
    fn a_template_is_checked_where_it_is_written() {
        for wrong in ["", "a b", "a..{topic}", ".{topic}", "$JS.{topic}", "a.*", "a.>"] {
            assert!(RULES.parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_pattern_takes_every_subject() {
        for (template, pattern) in [
            ("orders", "orders"),
            ("a.{key}.z", "a.*.z"),
            ("a.{topic}.{key}", "a.>"),
            ("a.{key}.b.{topic}", "a.>"),
            ("{topic}", ">"),
            ("a.k-{key}", "a.*"),
        ] {
            assert_eq!(super::pattern(&RULES.parse(template).expect("a template")), pattern);
        }
    }
}
