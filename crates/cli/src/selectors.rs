//! Which events a command selects: the same arguments for every command that lists or changes many.

use std::time::Duration;

use clap::{ArgGroup, Args};
use jiff::Timestamp;
use postbox_core::{Criteria, IdPrefix, Key, Tenant, TopicPattern};

use crate::args::{count, duration, pattern, plain, time};
use crate::context::Context;
use crate::failure::Failure;

/// By what never changes of an event.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub(crate) struct Selectors {
    /// Only topics that match this pattern, e.g. 'order.*'
    #[arg(long, value_name = "PATTERN", value_parser = pattern)]
    topic: Option<TopicPattern>,
    /// Only events of this key
    #[arg(long, value_parser = plain::<Key>)]
    key: Option<Key>,
    /// Only events of this tenant
    #[arg(long, value_parser = plain::<Tenant>)]
    tenant: Option<Tenant>,
    /// Appended at this time or later: 2026-01-31T12:00:00Z, or 2h for two hours ago
    #[arg(long, value_name = "TIME", value_parser = time)]
    since: Option<Timestamp>,
    /// Appended before this time
    #[arg(long, value_name = "TIME", value_parser = time)]
    until: Option<Timestamp>,
    /// Appended longer ago than this, e.g. 7d
    #[arg(long, value_name = "AGE", value_parser = duration, conflicts_with = "until")]
    older_than: Option<Duration>,
}

impl Selectors {
    /// Whether they select everything.
    pub(crate) fn are_none(&self) -> bool {
        let Self { topic, key, tenant, since, until, older_than } = self;
        let of_event = topic.is_none() && key.is_none() && tenant.is_none();
        of_event && since.is_none() && until.is_none() && older_than.is_none()
    }

    /// Converts them to the criteria of the stores. `now` is asked if an age was given.
    pub(crate) async fn criteria(
        self,
        now: impl AsyncFnOnce() -> Result<Timestamp, Failure>,
    ) -> Result<Criteria, Failure> {
        let (mut which, age) = self.criteria_and_age()?;
        if let Some(age) = age {
            let before = now().await?.checked_sub(age);
            which.until = Some(before.map_err(|_| Failure::usage("--older-than: that is too long an age"))?);
            check_times(&which)?;
        }
        Ok(which)
    }

    /// The same with the age separate, for a store that measures it by its own clock.
    pub(crate) fn criteria_and_age(self) -> Result<(Criteria, Option<Duration>), Failure> {
        let Self { topic, key, tenant, since, until, older_than } = self;
        let which = Criteria { topic, key, tenant, since, until };
        check_times(&which)?;
        Ok((which, older_than))
    }
}

fn check_times(which: &Criteria) -> Result<(), Failure> {
    match (which.since, which.until) {
        (Some(since), Some(until)) if since >= until => Err(Failure::usage(
            "no time is after --since and before --until or --older-than; give the later time to --until",
        )),
        _ => Ok(()),
    }
}

/// What a change of many events is about: ids, or all of those that are selected.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).multiple(true).args(
    ["ids", "all", "topic", "key", "tenant", "since", "until", "older_than"]))]
pub(crate) struct Meant {
    /// The ids of the events, or at least the first 8 digits of each
    #[arg(value_name = "ID", value_parser = plain::<IdPrefix>, conflicts_with_all = NO_IDS)]
    ids: Vec<IdPrefix>,
    /// All events, narrowed by the options below
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    which: Selectors,
    /// At most this many, oldest first
    #[arg(long, value_name = "N", value_parser = count)]
    limit: Option<usize>,
    /// Only count them: change nothing
    #[arg(long)]
    dry_run: bool,
}

/// Arguments that cannot be combined with ids.
const NO_IDS: [&str; 8] = ["all", "topic", "key", "tenant", "since", "until", "older_than", "limit"];

/// The parsed selection.
pub(crate) struct Chosen {
    /// Only these events.
    pub(crate) ids: Option<Vec<IdPrefix>>,
    pub(crate) which: Criteria,
    pub(crate) limit: Option<usize>,
    pub(crate) dry_run: bool,
}

impl Meant {
    /// Measures an age by the clock of the store, which dated the events.
    pub(crate) async fn chosen(self, context: &Context) -> Result<Chosen, Failure> {
        let Self { ids, all: _, which, limit, dry_run } = self;
        let ids = (!ids.is_empty()).then_some(ids);
        let which = which.criteria(async || Ok(context.store().await?.time().await?)).await?;
        Ok(Chosen { ids, which, limit, dry_run })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser as _;
    use jiff::Timestamp;

    use super::Selectors;
    use crate::args::Args;
    use crate::failure::Failure;

    fn parses(args: &[&str]) -> bool {
        Args::try_parse_from([&["postbox"], args].concat()).is_ok()
    }

    const ID: &str = "01234567-89ab-7def-8123-456789abcdef";

    #[test]
    fn a_change_of_many_events_wants_ids_or_says_which() {
        for command in ["retry", "discard", "mark-dead", "replay"] {
            assert!(!parses(&[command]), "{command}");
            assert!(!parses(&[command, "--limit", "5"]), "{command}: everything is asked for by name");
            assert!(parses(&[command, ID, ID]) && parses(&[command, ID, "--dry-run"]), "{command}");
            for narrowed in [
                &["--all"][..],
                &["--topic", "a"],
                &["--key", "a"],
                &["--tenant", "a"],
                &["--since", "2h"],
                &["--until", "2h"],
                &["--older-than", "1h"],
            ] {
                assert!(
                    parses(&[&[command], narrowed, &["--limit", "5", "--dry-run"]].concat()),
                    "{command} {narrowed:?}"
                );
                let both = [&[command, ID], narrowed].concat();
                assert!(!parses(&both), "{both:?}: an id is not narrowed, silently or otherwise");
            }
            assert!(!parses(&[command, ID, "--limit", "5"]), "{command}");
        }
        for command in ["retry", "discard", "mark-dead"] {
            assert!(parses(&[command, "--code", "http_500"]), "{command}");
            assert!(!parses(&[command, ID, "--code", "http_500"]), "{command}");
        }
    }

    /// The machine of the operator may have another clock than the store.
    #[tokio::test]
    async fn an_age_is_measured_by_the_clock_that_is_asked() {
        let of = |older_than| Selectors { topic: None, key: None, tenant: None, since: None, until: None, older_than };
        let now = Timestamp::UNIX_EPOCH + Duration::from_secs(3_600);
        let which = of(Some(Duration::from_secs(600))).criteria(async || Ok(now)).await.expect("an age");
        assert_eq!(which.until, Some(Timestamp::UNIX_EPOCH + Duration::from_secs(3_000)));
        let nothing = of(None).criteria(async || Err(Failure::usage("no age"))).await.expect("not asked");
        assert_eq!(nothing.until, None);
    }

    #[test]
    fn a_prune_wants_an_age_or_a_time() {
        assert!(!parses(&["prune"]) && !parses(&["prune", "--topic", "a"]) && !parses(&["prune", "--since", "2h"]));
        for bound in [["--older-than", "7d"], ["--until", "2026-01-31T12:00:00Z"]] {
            assert!(parses(&[&["prune"], &bound[..], &["--topic", "a", "--dry-run", "--unrouted"]].concat()));
        }
        assert!(!parses(&["prune", "--older-than", "7d", "--until", "2h"]));
        assert!(parses(&["prune", "--older-than", "7d", "--code", "http_422", "--limit", "5"]));
        assert!(!parses(&["prune", "--older-than", "7d", "--code", "x", "--unrouted"]), "what nobody wants has none");
    }
}
