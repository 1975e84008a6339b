//! Cron expressions with second precision, in UTC.

use std::fmt;
use std::str::FromStr;

use croner::parser::{CronParser, Seconds, Year};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use postbox_engine::Schedule as _;

/// A recurring time: `second minute hour day month weekday`, in UTC. Five fields are those of a
/// crontab, which has no second.
///
/// Always UTC, so that no run is skipped or doubled when a region changes its clocks.
#[derive(Clone)]
pub struct Cron(croner::Cron);

impl postbox_engine::Schedule for Cron {
    /// `None` when the expression has no further time (e.g. the 30th of February).
    fn next_after(&self, now: Timestamp) -> Option<Timestamp> {
        let local = now.to_zoned(TimeZone::UTC).datetime();
        let next = self.0.find_next_occurrence(&local, false).ok()?;
        Some(next.to_zoned(TimeZone::UTC).ok()?.timestamp())
    }
}

impl FromStr for Cron {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // With a year, a relay would have nothing to wait for one day.
        CronParser::builder()
            .seconds(Seconds::Optional)
            .year(Year::Disallowed)
            .build()
            .parse(text)
            .map(Self)
            .map_err(|error| error.to_string())
            .and_then(|cron| match cron.next_after(Timestamp::now()) {
                Some(_) => Ok(cron),
                None => Err("no such time comes any more".to_owned()),
            })
            .map_err(|error| {
                format!("{text:?} is not a valid cron expression ({error}); write it as \"second minute hour day month weekday\", e.g. \"0 0 3 * * *\" for 03:00 UTC")
            })
    }
}

impl fmt::Display for Cron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_str())
    }
}

impl fmt::Debug for Cron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cron({self})")
    }
}

impl PartialEq for Cron {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(expression: &str, now: &str) -> String {
        let now: Timestamp = now.parse().expect("a time");
        expression.parse::<Cron>().expect("a schedule").next_after(now).expect("a next time").to_string()
    }

    #[test]
    fn seconds_count() {
        assert_eq!(next("*/5 * * * * *", "2026-11-21T09:00:01Z"), "2026-11-21T09:00:05Z");
        assert_eq!(next("0 0 3 * * *", "2026-11-21T03:00:00Z"), "2026-11-22T03:00:00Z");
    }

    #[test]
    fn five_fields_are_those_of_a_crontab() {
        assert_eq!(next("0 3 * * *", "2026-11-21T09:00:00Z"), "2026-11-22T03:00:00Z");
        assert_eq!(next("0 0 3 * *", "2026-11-21T09:00:00Z"), "2026-12-03T00:00:00Z");
        // Either the day or the weekday: the 23rd is a Monday.
        assert_eq!(next("30 4 1 * 1", "2026-11-21T09:00:00Z"), "2026-11-23T04:30:00Z");
    }

    #[test]
    fn nonsense_is_refused_with_the_form() {
        for wrong in ["at three", "0 0 6 1 1 * 2099"] {
            let error = wrong.parse::<Cron>().expect_err("refused");
            assert!(error.contains("second minute hour day month weekday"), "{error}");
        }
    }

    #[test]
    fn a_day_that_never_comes_is_refused() {
        let error = "0 0 3 30 2 *".parse::<Cron>().map(drop).expect_err("refused");
        assert!(error.contains("no such time comes"), "{error}");
    }
}
