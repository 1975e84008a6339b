//! Events that no subscription wants, by log and topic.

use std::collections::BTreeMap;
use std::time::Duration;

use postbox_config::nearest;
use postbox_core::limits::UNROUTED_COUNT_MAX;
use postbox_core::{Count, Filter, Inspect, LogName, Result, SubscriptionInfo, UnroutedTopic};

use super::Finding;
use crate::text::{cut, grouped, span};

/// Most topics that a message names.
const TOPICS_NAMED: usize = 3;
/// Longest topic name, in characters; the rest is cut.
const TOPIC_CHARS: usize = 60;

/// The end of a cure for whoever may delete events: not for one tenant.
pub const OR_DELETE: &str = "; to delete them: postbox prune --unrouted --older-than 7d";

/// Events of one log that no subscription wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnroutedLog {
    /// The log.
    pub log: LogName,
    /// Number of events, counted up to a limit.
    pub count: u64,
    /// The same by topic, largest first.
    pub topics: Vec<UnroutedTopic>,
    /// What to do, and the finding's code if it looks like a spelling mistake.
    cure: (String, Option<&'static str>),
}

/// Events that no subscription wants, for each log that these subscriptions read. Logs without such
/// events are left out.
pub async fn unrouted(store: &dyn Inspect, infos: &[SubscriptionInfo]) -> Result<Vec<UnroutedLog>> {
    let mut by_log: BTreeMap<&LogName, Vec<&SubscriptionInfo>> = BTreeMap::new();
    for info in infos {
        by_log.entry(&info.log).or_default().push(info);
    }
    let mut found = Vec::new();
    for (log, infos) in by_log {
        let unrouted = store.unrouted(log).await?;
        if unrouted.count > 0 {
            let cure = cure(&unrouted.topics, &infos);
            found.push(UnroutedLog { log: log.clone(), count: unrouted.count, topics: unrouted.topics, cure });
        }
    }
    Ok(found)
}

/// The logs with events that none of these subscriptions reads, and their counts; with `only`, that
/// log at most. Nobody looks for unrouted events there, so their topics are unknown.
pub async fn unread(
    store: &dyn Inspect,
    infos: &[SubscriptionInfo],
    only: Option<&LogName>,
) -> Result<Vec<(LogName, Count)>> {
    let mut unread = Vec::new();
    for log in store.logs().await? {
        if infos.iter().all(|info| info.log != log) && only.is_none_or(|only| *only == log) {
            let count = store.count(&log).await?;
            unread.extend((count.events > 0).then_some((log, count)));
        }
    }
    Ok(unread)
}

impl UnroutedLog {
    /// One sentence: how many, of which topics, for how long.
    pub fn what(&self) -> String {
        let named = self.topics.iter().take(TOPICS_NAMED);
        let mut topics: Vec<String> =
            named.map(|topic| format!("{} ({})", cut(&topic.topic, TOPIC_CHARS), grouped(topic.count))).collect();
        match self.topics.len().saturating_sub(TOPICS_NAMED) {
            0 => {}
            more => topics.push(format!("{more} more topics")),
        }
        let at_least = if self.count >= UNROUTED_COUNT_MAX as u64 { "at least " } else { "" };
        let oldest = self.topics.iter().map(|topic| topic.oldest).max().unwrap_or(Duration::ZERO);
        format!(
            "no subscription wants {at_least}{} event(s) of the {}, the oldest for {}: {}",
            grouped(self.count),
            self.log,
            span(oldest),
            topics.join(", ")
        )
    }

    /// What to do about them.
    pub fn cure(&self) -> &str {
        &self.cure.0
    }

    /// The finding of `doctor`: a problem if it looks like a spelling mistake, else a note.
    pub(super) fn finding(&self) -> Finding {
        match &self.cure {
            (cure, Some(slip)) => Finding::problem(slip, self.what(), cure),
            (cure, None) => Finding::note("unrouted", self.what()).cure(cure),
        }
    }
}

/// Chooses the cure. Unrouted events are kept until a person decides. If the first word of a topic
/// is nearly that of a pattern, it is taken for a spelling mistake.
fn cure(topics: &[UnroutedTopic], infos: &[&SubscriptionInfo]) -> (String, Option<&'static str>) {
    for topic in topics.iter().take(TOPICS_NAMED) {
        let (first, _) = topic.topic.split_once('.').unwrap_or((&topic.topic, ""));
        for info in infos {
            let near = info.filter.topics.iter().find_map(|pattern| {
                let (word, rest) = pattern.as_str().split_once('.')?;
                (word != first && nearest(first, &[word]).is_some())
                    .then(|| (pattern.as_str(), format!("{first}.{rest}")))
            });
            if let Some((pattern, meant)) = near {
                let (name, meant) = (&info.name, cut(&meant, TOPIC_CHARS));
                return (
                    format!(
                        "is `{pattern}` in the topics of {name} mistyped for `{meant}`, or is the producer's topic?"
                    ),
                    Some("topics_mistyped"),
                );
            }
        }
    }
    // A subscription wants the topic, but the rest of its filter excludes these events.
    for info in infos {
        let Filter { tenant, kinds, aggregates, headers, .. } = &info.filter;
        let is_wanted = topics.iter().take(TOPICS_NAMED).any(|topic| info.filter.wants_topic(&topic.topic));
        let is_partial = !kinds.is_empty() || !aggregates.is_empty() || !headers.is_empty();
        if is_wanted && is_partial {
            let cure = format!(
                "{} wants these topics, but its filter excludes these events: check its `kinds`, `aggregates` and `headers`, or add a subscription for the others",
                info.name
            );
            return (cure, None);
        }
        if let (Some(tenant), true) = (tenant, is_wanted) {
            let cure = format!(
                "{} wants these topics, but only of the tenant {tenant}: correct or remove its `tenant`, or add a subscription for the others",
                info.name
            );
            return (cure, Some("tenant_unwanted"));
        }
    }
    (format!("they are kept for the first subscription that wants them{OR_DELETE}"), None)
}
