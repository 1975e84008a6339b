//! Signed timestamps: their format, and how far from now they may be.

use crate::error::{Part, Refusal};

/// Seconds since 1970. Always passed in: this crate has no clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixSeconds(pub i64);

/// Most digits of a timestamp: enough for 30,000 years, too few to overflow anything.
const DIGITS_MAX: usize = 12;

impl UnixSeconds {
    /// Parses plain digits: no sign, no space, no exponent, no leading zero, at most 12 of them.
    pub(crate) fn parse(text: &str) -> Result<Self, Refusal> {
        let plain = (1..=DIGITS_MAX).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_digit())
            && (text == "0" || !text.starts_with('0'));
        let seconds = plain.then(|| text.parse().ok()).flatten();
        seconds.map(Self).ok_or(Refusal::Malformed(Part::Timestamp))
    }
}

/// How far a signed timestamp may be from now, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tolerance {
    /// Seconds it may be in the past. The longer, the longer a captured message can be replayed.
    pub past_s: u32,
    /// Seconds it may be in the future.
    pub future_s: u32,
}

impl Default for Tolerance {
    /// Five minutes both ways, as in every provider's own library.
    fn default() -> Self {
        Self { past_s: 300, future_s: 300 }
    }
}

impl Tolerance {
    pub(crate) fn check(self, signed: UnixSeconds, now: UnixSeconds) -> Result<(), Refusal> {
        let age = now.0.saturating_sub(signed.0);
        if age > i64::from(self.past_s) {
            return Err(Refusal::TooOld);
        }
        if age < -i64::from(self.future_s) {
            return Err(Refusal::TooNew);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_digits_are_a_timestamp() {
        assert_eq!(UnixSeconds::parse("1614265330"), Ok(UnixSeconds(1_614_265_330)));
        for wrong in [
            "",
            "-1",
            "+1",
            " 1",
            "1 ",
            "1e9",
            "1.0",
            "0x10",
            "01",
            "1_000",
            "१२",
            "1614265330\n",
            "1234567890123",
            "99999999999999999999",
        ] {
            assert_eq!(UnixSeconds::parse(wrong), Err(Refusal::Malformed(Part::Timestamp)), "{wrong:?}");
        }
    }

    #[test]
    fn the_edges_of_the_tolerance_are_inside() {
        let check = |signed| Tolerance::default().check(UnixSeconds(signed), UnixSeconds(1_000));
        assert_eq!(check(700), Ok(()));
        assert_eq!(check(699), Err(Refusal::TooOld));
        assert_eq!(check(1_300), Ok(()));
        assert_eq!(check(1_301), Err(Refusal::TooNew));
        assert_eq!(Tolerance::default().check(UnixSeconds(0), UnixSeconds(i64::MAX)), Err(Refusal::TooOld));
        assert_eq!(Tolerance::default().check(UnixSeconds(i64::MAX), UnixSeconds(i64::MIN)), Err(Refusal::TooNew));
    }
}
