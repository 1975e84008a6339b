//! Text for people. Foreign text is made safe to print: a payload must not be able to move the
//! cursor, change the window title or hide itself.

use std::fmt::Write as _;

/// Whether a terminal may interpret this character instead of showing it: control characters (C0,
/// DEL, C1), line and paragraph separators, and marks that change the reading direction.
pub fn is_hostile(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Escapes the hostile characters of a text, except those to `keep`.
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

/// Makes a text safe for one line or cell.
pub fn safe_line(text: &str) -> String {
    neutralise(text, |_| false)
}

/// Makes a text of several lines safe.
pub fn safe_lines(text: &str) -> String {
    neutralise(text, |c| matches!(c, '\n' | '\t'))
}

/// Makes JSON text safe. Hostile characters occur only inside JSON strings, where `\uXXXX` means
/// the same. The bytes below 0x20 that a serialiser writes outside of strings are line breaks and
/// tabs.
pub fn safe_json(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    for c in json.chars() {
        if is_hostile(c) && !matches!(c, '\n' | '\t' | '\r') {
            let _ = write!(safe, "\\u{:04x}", u32::from(c));
        } else {
            safe.push(c);
        }
    }
    safe
}

/// A count with thousands separators; `~` before an estimate.
pub fn estimated(count: u64, is_estimate: bool) -> String {
    format!("{}{}", if is_estimate { "~" } else { "" }, grouped(count))
}

/// The first `most` characters, and an ellipsis if there are more.
pub fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// `1,234,567`
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `2d 3h`, `4m 10s`, `1.2s`, `15ms`: two units at most.
pub fn span(duration: std::time::Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 => format!("{}ms", duration.as_millis()),
        1..60 => format!("{:.1}s", duration.as_secs_f64()),
        60..3_600 => format!("{}m {}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h {}m", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{}d {}h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_commands_become_text() {
        assert_eq!(safe_line("a\x1b[2Jb\u{9b}31m\u{202e}c\n"), "a\\u{1b}[2Jb\\u{9b}31m\\u{202e}c\\n");
        assert_eq!(safe_lines("a\n\tb\x07"), "a\n\tb\\u{7}");
        assert_eq!(safe_line("żółć 日本 🦀"), "żółć 日本 🦀");
    }

    #[test]
    fn safe_json_is_the_same_json() {
        let json = "{\n \"a\": \"\u{9b}31m\u{7f}\u{202e}\"\n}";
        let safe = safe_json(json);
        assert!(!safe.chars().any(|c| is_hostile(c) && c != '\n'));
        let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("JSON");
        assert_eq!(value(json), value(&safe));
    }

    #[test]
    fn numbers_and_times_are_readable() {
        assert_eq!([grouped(0), grouped(999), grouped(1_000), grouped(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
        let shown = [15, 1_200, 250_000, 11_000_000, 183_600_000].map(|ms| span(std::time::Duration::from_millis(ms)));
        assert_eq!(shown, ["15ms", "1.2s", "4m 10s", "3h 3m", "2d 3h"]);
        assert_eq!(cut("abcdef", 4), "abc…");
    }
}
