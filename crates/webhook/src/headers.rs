//! The rule for reading headers: a header that a scheme reads must occur exactly once, in visible
//! ASCII.
//!
//! HTTP allows repeated headers, and proxies differ in which one they keep, so a request with two
//! signatures or two timestamps means different things to different readers. Such a request is
//! refused, even if both are equal.

use crate::error::{Part, Refusal};

/// A request's headers, as pairs; names are compared without regard to case.
///
/// Collect them from any HTTP library:
/// `request.headers().iter().map(|(n, v)| (n.as_str(), v.as_bytes())).collect()`.
#[derive(Debug, Clone, Default)]
pub struct Headers<'a> {
    fields: Vec<(&'a str, &'a [u8])>,
}

impl<'a> FromIterator<(&'a str, &'a [u8])> for Headers<'a> {
    fn from_iter<I: IntoIterator<Item = (&'a str, &'a [u8])>>(fields: I) -> Self {
        Self { fields: fields.into_iter().collect() }
    }
}

impl<'a> Headers<'a> {
    /// Whether such a header exists.
    pub fn has(&self, name: &str) -> bool {
        self.values(name).next().is_some()
    }

    /// Returns the header's single value.
    pub(crate) fn only(&self, part: Part, name: &str) -> Result<&'a str, Refusal> {
        let mut values = self.values(name);
        let value = values.next().ok_or(Refusal::Missing(part))?;
        if values.next().is_some() {
            return Err(Refusal::Duplicate(part));
        }
        let visible = !value.is_empty() && value.iter().all(|byte| matches!(byte, b' '..=b'~'));
        if !visible {
            return Err(Refusal::Malformed(part));
        }
        std::str::from_utf8(value).map_err(|_| Refusal::Malformed(part))
    }

    fn values(&self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        self.fields.iter().filter(move |(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| *value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(fields: &[(&'static str, &'static str)]) -> Result<&'static str, Refusal> {
        let headers: Headers<'static> = fields.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
        headers.only(Part::Signature, "x-sig")
    }

    #[test]
    fn exactly_one_is_read_and_names_ignore_case() {
        assert_eq!(only(&[("X-Sig", "a")]), Ok("a"));
        assert_eq!(only(&[]), Err(Refusal::Missing(Part::Signature)));
        assert_eq!(only(&[("x-sig", "a"), ("X-SIG", "a")]), Err(Refusal::Duplicate(Part::Signature)));
        for value in ["", "é", "a\tb", "a\u{7f}"] {
            assert_eq!(only(&[("x-sig", value)]), Err(Refusal::Malformed(Part::Signature)), "{value:?}");
        }
    }
}
