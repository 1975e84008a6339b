//! Everything that is wrong with a configuration, all at once, each at its line.

use std::fmt;

/// One thing that is wrong, and how to fix it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The line in the file, from 1; 0 when it belongs to no line.
    pub line: usize,
    /// What is wrong and how to fix it, in one line.
    pub text: String,
}

/// All faults of one file, in the order of their lines. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults {
    file: String,
    faults: Vec<Fault>,
}

impl Faults {
    pub(super) fn new(file: &str, mut faults: Vec<Fault>) -> Self {
        faults.sort_by_key(|fault| fault.line);
        faults.dedup();
        Self { file: file.to_owned(), faults }
    }

    /// The faults, by line.
    pub fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.faults.iter()
    }

    /// How many there are; at least 1.
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

/// `; did you mean "batch"?` when something known is near, else the list of what is known.
pub(super) fn suggestion(wrong: &str, known: &[&str]) -> String {
    let nearest = known
        .iter()
        .map(|name| (strsim::damerau_levenshtein(wrong, name), name))
        .filter(|(distance, name)| *distance <= 2.max(name.len() / 3))
        .min_by_key(|(distance, _)| *distance);
    match nearest {
        Some((_, name)) => format!("did you mean `{name}`?"),
        None => format!("known here: {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_words_are_suggested_and_far_ones_are_not() {
        assert_eq!(suggestion("batsh", &["batch", "retry"]), "did you mean `batch`?");
        assert_eq!(suggestion("zzzzzz", &["batch", "retry"]), "known here: batch, retry");
    }
}
