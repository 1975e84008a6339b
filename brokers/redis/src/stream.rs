//! The name of the stream that an event is added to.

use std::convert::Infallible;

use postbox_core::template::NameRules;
use postbox_core::{Event, Outcome, Template};

const RULES: NameRules = NameRules { what: "stream", code: "stream_invalid", separator: None, check };

/// Parses a template of stream names.
pub(crate) fn parse(text: &str) -> Result<Template, String> {
    RULES.parse(text)
}

/// Returns the stream of an event. The error is [`Outcome::Dead`]: the event will never have one.
pub(crate) fn render(template: &Template, event: &Event) -> Result<String, Outcome> {
    RULES.name(template, event)
}

fn check(name: &str) -> Result<(), String> {
    match name {
        "" => Err("it is empty; write the name of a stream, e.g. \"events:{topic}\"".to_owned()),
        _ => Ok(()),
    }
}

/// Returns a pattern, in the syntax of Redis, that all stream names of a template match.
pub(crate) fn pattern(template: &Template) -> String {
    // A null character marks the place of a field, because no template contains one as text.
    let Ok(names) = template.fill(|_, _| Ok::<_, Infallible>("\0"));
    let mut pattern = String::with_capacity(names.len());
    for c in names.chars() {
        if "*?[]^-\\".contains(c) {
            pattern.push('\\');
        }
        pattern.push(if c == '\0' { '*' } else { c });
    }
    pattern
}

#[cfg(test)]
mod tests {
    use postbox_core::{EventId, NewEvent};

    use super::*;

    fn name(template: &str, event: NewEvent) -> Result<String, String> {
        let event = event.into_event(EventId::now_v7(), jiff::Timestamp::UNIX_EPOCH);
        render(&parse(template).expect("a template"), &event).map_err(|outcome| match outcome {
            Outcome::Dead { code, .. } => code.into_owned(),
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn no_two_ways_lead_to_one_name() {
        let event = |tenant: &str, topic: &str| NewEvent::json(topic, "{}").tenant(tenant);
        assert_eq!(name("{tenant}:{topic}", event("a", "b:c")).as_deref(), Ok("a:b:c"));
        assert_eq!(name("{tenant}:{topic}", event("a:b", "c")), Err("stream_invalid".into()));
        assert_eq!(name("{tenant}:{topic}", NewEvent::json("t", "{}")), Err("stream_invalid".into()));
        assert_eq!(name("events:{key}", NewEvent::json("t", "{}")), Err("stream_invalid".into()));
    }

    #[test]
    fn a_pattern_takes_the_template_s_own_text_literally() {
        let pattern = |text: &str| pattern(&parse(text).expect("a template"));
        assert_eq!(pattern("events:{topic}"), "events:*");
        assert_eq!(pattern("{tenant}:a*b[c]-{{?}}:{topic}"), r"*:a\*b\[c\]\-{\?}:*");
    }

    #[test]
    fn mistakes_are_named() {
        for (template, word) in
            [("", "empty"), ("{topik}", "{topik} is no field"), ("{topic}{key}", "between"), ("a}", "brace")]
        {
            let fault = parse(template).expect_err("refused");
            assert!(fault.contains(word), "{template}: {fault}");
        }
    }
}
