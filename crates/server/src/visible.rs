//! Text from outside, made safe to print: a payload must not be able to move the cursor, change the title or hide itself.

use std::fmt::Write as _;

/// Whether a terminal could take this character for something other than text: control characters (C0, DEL, C1), line and
/// paragraph separators, and the marks that turn the reading direction.
pub fn is_hostile(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// The text with its hostile characters spelt out, but for those to `keep`.
pub fn neutralise(text: &str, keep: impl Fn(char) -> bool) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if keep(c) || !is_hostile(c) => safe.push(c),
            '\n' => safe.push_str("\\n"),
            '\r' => safe.push_str("\\r"),
            '\t' => safe.push_str("\\t"),
            c => {
                let _ = write!(safe, "\\u{{{:x}}}", u32::from(c));
            }
        }
    }
    safe
}
