//! Cron expressions with second precision, in UTC.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// When something happens again and again: `second minute hour day month weekday`, in UTC.
///
/// Always UTC, so that no run is skipped or doubled when a region changes its clocks.
#[derive(Clone)]
pub struct Schedule(croner::Cron);

impl Schedule {
    /// The first moment after `now`, or `None` when there is none left (e.g. the 30th of February).
    pub fn next_after(&self, now: Timestamp) -> Option<Timestamp> {
        let local = now.to_zoned(TimeZone::UTC).datetime();
        let next = self.0.find_next_occurrence(&local, false).ok()?;
        Some(next.to_zoned(TimeZone::UTC).ok()?.timestamp())
    }
}

impl FromStr for Schedule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        croner::parser::CronParser::builder()
            .seconds(croner::parser::Seconds::Optional)
            .build()
            .parse(text)
            .map(Self)
            .map_err(|error| {
                format!("{text:?} is no cron expression ({error}); write it as \"second minute hour day month weekday\", e.g. \"0 0 3 * * *\" for 03:00 UTC")
            })
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_str())
    }
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Schedule({self})")
    }
}

impl PartialEq for Schedule {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(expression: &str, now: &str) -> String {
        let now: Timestamp = now.parse().expect("a time");
        expression.parse::<Schedule>().expect("a schedule").next_after(now).expect("a next time").to_string()
    }

    #[test]
    fn seconds_count() {
        assert_eq!(next("*/5 * * * * *", "2026-11-21T09:00:01Z"), "2026-11-21T09:00:05Z");
        assert_eq!(next("0 0 3 * * *", "2026-11-21T03:00:00Z"), "2026-11-22T03:00:00Z");
    }

    #[test]
    fn five_fields_mean_minutes() {
        assert_eq!(next("0 3 * * *", "2026-11-21T09:00:00Z"), "2026-11-22T03:00:00Z");
    }

    #[test]
    fn nonsense_is_refused_with_the_form() {
        let error = "at three".parse::<Schedule>().expect_err("refused");
        assert!(error.contains("second minute hour day month weekday"), "{error}");
    }

    #[test]
    fn a_day_that_never_comes_has_no_next() {
        let schedule: Schedule = "0 0 3 30 2 *".parse().expect("well formed");
        assert_eq!(schedule.next_after("2026-11-21T09:00:00Z".parse().expect("a time")), None);
    }
}
