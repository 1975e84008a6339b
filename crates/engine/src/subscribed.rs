//! What subscribing changed, for the log.

use postbox_core::{Subscription, SubscriptionInfo, SubscriptionName};
use tracing::{info, warn};

/// What to do about a subscription that is new beside others, if it is not meant to be.
const RENAMED: &str = "with start Beginning it gets every event still in the log; \
    if it is a new name of another: stop, remove it, and run postbox subscription rename OLD NEW";

/// Logs what subscribing changed, given what the store had `known` before. A renamed subscription
/// starts anew beside its former name, which this program does not use any more (`is_ours`).
/// Another filter changes what a replica, or another program that uses the name, reads.
pub fn note_subscribed(wanted: &Subscription, known: &[SubscriptionInfo], is_ours: impl Fn(&SubscriptionName) -> bool) {
    let Subscription { name, log, filter, start, .. } = wanted;
    if let Some(info) = known.iter().find(|info| info.name == *name) {
        if info.filter != *filter {
            warn!(subscription = %name, from = %info.filter, to = %filter, "filter changed");
        }
        return;
    }
    let others = known.iter().filter(|info| info.log == *log && !is_ours(&info.name));
    let others: Vec<&str> = others.map(|info| info.name.as_str()).collect();
    match others.is_empty() {
        true => info!(subscription = %name, %log, ?start, "subscription created"),
        false => warn!(subscription = %name, %log, ?start, ?others, cure = RENAMED, "subscription created"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use postbox_core::{Inspect as _, Log as _, LogName, TopicPattern};
    use postbox_memory::MemoryStore;
    use postbox_testkit::warnings::Warnings;

    use super::*;
    use crate::clock::TokioClock;

    #[tokio::test(start_paused = true)]
    async fn another_filter_and_a_new_name_beside_strangers_are_warned_of() {
        let store = MemoryStore::new(Arc::new(TokioClock::new()));
        let named = |name: &str| Subscription::new(name.parse().expect("a name"), LogName::outbox());
        let (mails, mut filtered, letters) = (named("mails"), named("mails"), named("letters"));
        filtered.filter.topics.push(TopicPattern::new("order.*").expect("a pattern"));
        store.subscribe(&mails).await.expect("subscribed");
        let known = store.subscriptions().await.expect("listed");
        for (wanted, is_ours, expected) in [
            (&mails, true, None),
            (&filtered, true, Some("filter changed")),
            (&letters, true, None),
            (&letters, false, Some("subscription created")),
        ] {
            let (warnings, _hears) = Warnings::hear();
            note_subscribed(wanted, &known, |_| is_ours);
            let lines = warnings.all();
            assert_eq!(lines.len(), usize::from(expected.is_some()), "{lines:?}");
            assert!(lines.iter().all(|line| expected.is_some_and(|text| line.contains(text))), "{lines:?}");
        }
    }
}
