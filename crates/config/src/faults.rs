//! All faults of a configuration, each with its line.

use std::fmt;

/// One fault, and how to fix it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The line in the file, from 1; 0 if it belongs to no line.
    pub line: usize,
    /// What is wrong and how to fix it, in one line.
    pub text: String,
}

/// All faults of one file, by line. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults {
    file: String,
    faults: Vec<Fault>,
}

impl Faults {
    /// Sorts the faults by line. Messages begin with the name `file`.
    pub fn new(file: &str, mut faults: Vec<Fault>) -> Self {
        faults.sort_by_key(|fault| fault.line);
        faults.dedup();
        Self { file: file.to_owned(), faults }
    }

    /// The faults, by line.
    pub fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.faults.iter()
    }

    /// Number of faults; at least 1.
    pub fn count(&self) -> usize {
        self.faults.len()
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.faults.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            match fault.line {
                0 => write!(f, "{}: {}", self.file, fault.text)?,
                line => write!(f, "{}:{line}: {}", self.file, fault.text)?,
            }
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}

/// `did you mean "batch"?` if a known word is near, else the list of known words.
pub fn suggestion(wrong: &str, known: &[&str]) -> String {
    match nearest(wrong, known) {
        Some(name) => format!("did you mean `{name}`?"),
        None => format!("known here: {}", known.join(", ")),
    }
}

/// Returns the known word nearest to a wrong one, if it is within two edits or a third of its
/// length. Of a short word at least half must be right.
pub fn nearest<'a>(wrong: &str, known: &[&'a str]) -> Option<&'a str> {
    let near = known
        .iter()
        .map(|name| (strsim::damerau_levenshtein(wrong, name), *name))
        .filter(|(distance, name)| *distance <= (name.len() / 2).min(2.max(name.len() / 3)));
    near.min_by_key(|(distance, _)| *distance).map(|(_, name)| name)
}

/// The message about an unknown key or section. The name is repeated only if it consists of short
/// words: it may be a secret on the wrong side of the equals sign. The line number says where it
/// is.
pub(crate) fn unknown(kind: &str, wrong: &str, place: &str, known: &[&str]) -> String {
    let is_word = |word: &str| (1..=10).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_lowercase());
    let name = if nearest(wrong, known).is_some() || (wrong.len() <= 24 && wrong.split('_').all(is_word)) {
        format!(" `{}`", wrong.escape_debug())
    } else {
        String::new()
    };
    format!("unknown {kind}{name}{place}; {}", suggestion(wrong, known))
}

/// Whether misplaced text may be a secret: a long run of letters and digits, or a known prefix of
/// keys. Such text is never repeated.
pub(crate) fn may_be_secret(text: &str) -> bool {
    const RUN_CHARS_MIN: usize = 16;
    let in_key = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '=' | '_' | '-');
    let mixed = |run: &str| {
        let any = |is: fn(&u8) -> bool| run.as_bytes().iter().any(is);
        run.len() >= RUN_CHARS_MIN && any(u8::is_ascii_digit) && any(u8::is_ascii_alphabetic)
    };
    ["wh", "sk_", "rk_", "gh", "xox", "Bearer "].iter().any(|prefix| text.starts_with(prefix))
        || text.split(|c| !in_key(c)).any(mixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_a_secret_is_recognised() {
        for text in [
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "sk_live_x",
            "ghp_x",
            "Bearer x",
            "9f86d081884c7d659a2feaa0c55ad015",
            "a VEVTVFNJR05JTkdLRVk1 b",
        ] {
            assert!(may_be_secret(text), "{text}");
        }
        for text in
            ["", "random", "ten", "2026-13-01T00:00:00Z", "10.20.0.0/33", "99999999999999999999", "localhost:86000"]
        {
            assert!(!may_be_secret(text), "{text}");
        }
    }

    #[test]
    fn near_words_are_suggested_and_far_ones_are_not() {
        assert_eq!(suggestion("batsh", &["batch", "retry"]), "did you mean `batch`?");
        assert_eq!(suggestion("zzzzzz", &["batch", "retry"]), "known here: batch, retry");
    }
}
