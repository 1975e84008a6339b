//! The name of the stream that an event is added to.

use std::convert::Infallible;

use postbox_core::Template;
use postbox_core::template::NameRules;

pub(crate) const RULES: NameRules = NameRules { what: "stream", code: "stream_invalid", separator: None, check };

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
    use super::*;

    #[test]
    fn a_pattern_takes_the_template_s_own_text_literally() {
        let pattern = |text: &str| pattern(&RULES.parse(text).expect("a template"));
        assert_eq!(pattern("events:{topic}"), "events:*");
        assert_eq!(pattern("{tenant}:a*b[c]-{{?}}:{topic}"), r"*:a\*b\[c\]\-{\?}:*");
    }

    #[test]
    fn no_name_is_empty() {
        let fault = RULES.parse("").expect_err("refused");
        assert!(fault.contains("empty"), "{fault}");
    }
}
