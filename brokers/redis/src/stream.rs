//! The name of the stream that an event is added to.
//!
//! A value that contains the text which follows its field in the template is refused. Otherwise
//! different events could get the same stream by accident: with `{tenant}:{topic}`, tenant `a` with
//! topic `b:c` and tenant `a:b` with topic `c`.

use std::convert::Infallible;

use postbox_config::from_core;
use postbox_core::{Event, Outcome, Template};

/// Parses a template of stream names.
pub(crate) fn parse(text: &str) -> Result<Template, String> {
    let template = from_core::<Template>(text)?;
    if text.is_empty() {
        return Err("is empty; write the name of a stream, e.g. \"events:{topic}\"".to_owned());
    }
    if let Some((_, field)) = template.adjacent() {
        let name = field.as_str();
        return Err(format!("nothing stands before {{{name}}} to end the field before it; write a \":\" there"));
    }
    Ok(template)
}

/// Returns the stream of an event. An event is dead if it lacks a field, or if its stream could be
/// that of another event.
pub(crate) fn render(template: &Template, event: &Event) -> Result<String, Outcome> {
    template.fill(|field, behind| {
        let name = field.as_str();
        match field.of(event) {
            "" => {
                let text = format!("the stream's name needs the event's {name}, and it has none");
                Err(Outcome::dead("stream_field_missing", text))
            }
            value if !behind.is_empty() && value.contains(behind) => {
                let text = format!("the event's {name} holds {behind:?}, which ends it in the stream's name");
                Err(Outcome::dead("stream_name_ambiguous", text))
            }
            value => Ok(value),
        }
    })
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
        assert_eq!(name("{tenant}:{topic}", event("a:b", "c")), Err("stream_name_ambiguous".into()));
        assert_eq!(name("{tenant}:{topic}", NewEvent::json("t", "{}")), Err("stream_field_missing".into()));
        assert_eq!(name("events:{key}", NewEvent::json("t", "{}")), Err("stream_field_missing".into()));
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
            [("", "empty"), ("{topik}", "{topik} is no field"), ("{topic}{key}", "before {key}"), ("a}", "brace")]
        {
            let fault = parse(template).expect_err("refused");
            assert!(fault.contains(word), "{template}: {fault}");
        }
    }
}
