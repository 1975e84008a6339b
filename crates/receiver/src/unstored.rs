//! Whether the messages of a source can be stored.

use std::time::Duration;

use postbox_core::{Error, Outage};

/// How long failures go on before they count. A lock or a restart of the store that is over sooner
/// is no news.
const COUNTS_AFTER: Duration = Duration::from_secs(2);
/// How long the last failure counts. Readiness may keep senders away, and then no message would
/// show that storing works again. Senders that were refused come again within some seconds at
/// first.
const KEPT: Duration = Duration::from_secs(30);

/// The failures since the last message that was stored.
#[derive(Debug, Default)]
pub(crate) struct Unstored(Option<Streak>);

#[derive(Debug)]
struct Streak {
    outage: Outage,
    /// When it began, and when the last message failed (monotonic).
    began: Duration,
    last: Duration,
    message_id: String,
    /// Whether more than this one message is refused.
    is_general: bool,
}

impl Unstored {
    /// Notes that a message could not be stored at a time of the monotonic clock. The time of
    /// `outage` is that of this failure.
    pub(crate) fn observe(&mut self, message_id: &str, failure: &Error, outage: Outage, now: Duration) {
        let code = outage.code.clone();
        let streak = self.0.get_or_insert_with(|| Streak {
            outage,
            began: now,
            last: now,
            message_id: message_id.to_owned(),
            is_general: false,
        });
        streak.outage.code = code;
        streak.last = now;
        // A sender repeats the one message that a trigger of the application refuses.
        streak.is_general |= !failure.is_refused_alone() || streak.message_id != message_id;
    }

    /// Notes that a message was stored.
    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }

    /// Returns since when and why nothing can be stored, if that is so.
    pub(crate) fn outage(&self, now: Duration) -> Option<Outage> {
        let streak = self.0.as_ref()?;
        let counts = streak.is_general
            && streak.last.saturating_sub(streak.began) >= COUNTS_AFTER
            && now.saturating_sub(streak.last) <= KEPT;
        counts.then(|| streak.outage.clone())
    }
}
