//! What a source knows of its consumer, and where the consumer begins again if it is lost.

use std::sync::Mutex;
use std::time::Duration;

use async_nats::Client;
use jiff::Timestamp;
use postbox_core::limits::MESSAGE_IDS_AGE_MIN;
use postbox_core::{Clock, Down, lock};
use tracing::warn;

use crate::config::NatsSourceTable;
use crate::jetstream::{Consumer, ensure_consumer};

/// How often a source without messages asks whether all of them are acknowledged: seldom enough for
/// the server, and often beside the seven days for which every inbox remembers ids.
const ASK_EVERY: Duration = Duration::from_secs(600);

/// By how much this machine's clock may be ahead of the server's, which dates the messages.
const CLOCKS_APART_MAX: Duration = Duration::from_secs(3600);

/// What is known of a consumer.
#[derive(Default)]
pub(crate) struct ConsumerState {
    /// `None` until it was seen.
    seen: Option<Consumer>,
    /// When the server last said that nothing is pending and nothing awaits an acknowledgement, by
    /// this machine's clock. What was stored before is acknowledged, by whichever replica.
    done_at: Option<Timestamp>,
    /// Before this monotonic time, an idle source does not ask again.
    ask_from: Duration,
}

impl ConsumerState {
    /// Returns the consumer's settings, known once connected.
    pub(crate) fn settings(&self) -> Consumer {
        self.seen.unwrap_or_default()
    }

    /// Whether an idle source inspects the consumer now.
    pub(crate) fn may_ask(&mut self, now: Duration) -> bool {
        let may = now >= self.ask_from;
        if may {
            self.ask_from = now + ASK_EVERY;
        }
        may
    }

    /// Returns where the consumer begins if it is missing; `None` is the first message. Nobody
    /// knows what was pending since all was acknowledged. Within the time for which every inbox
    /// remembers ids, an earlier start costs nothing.
    fn since(&self, now: Timestamp) -> Option<Timestamp> {
        let remembered = now.checked_sub(MESSAGE_IDS_AGE_MIN).unwrap_or_default();
        self.done_at.map(|done_at| done_at.min(remembered))
    }
}

/// Makes sure that the consumer exists, and notes what the server says of it.
pub(crate) async fn inspect(
    client: &Client,
    table: &NatsSourceTable,
    state: &Mutex<ConsumerState>,
    clock: &dyn Clock,
) -> Result<(), Down> {
    // Read before the server is asked, because the answer may not know what is stored meanwhile.
    let now = clock.now();
    let since = lock(state).since(now);
    let found = ensure_consumer(client, table, since).await?;
    let mut state = lock(state);
    if found.is_made && state.seen.is_some() {
        let since = since.map_or_else(|| "the first message".to_owned(), |since| since.to_string());
        warn!(stream = table.stream, consumer = table.consumer, since, "lost consumer created again");
    }
    if found.is_done {
        state.done_at = now.checked_sub(CLOCKS_APART_MAX).ok();
    }
    state.seen = Some(found);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_consumer_begins_where_all_was_acknowledged_or_ids_are_remembered() {
        let at = |hours: i64| Timestamp::from_second(hours * 3600).expect("a time");
        let now = at(1000);
        let since = |done_at| ConsumerState { done_at, ..ConsumerState::default() }.since(now);
        assert_eq!(since(None), None, "nothing is known");
        assert_eq!(since(Some(at(999))), Some(at(1000 - 7 * 24)));
        assert_eq!(since(Some(at(5))), Some(at(5)), "behind for longer than ids are remembered");
    }

    #[test]
    fn an_idle_source_asks_once_in_ten_minutes() {
        let mut state = ConsumerState::default();
        let asked = [0, 1, 599, 600, 601].map(|seconds| state.may_ask(Duration::from_secs(seconds)));
        assert_eq!(asked, [true, false, false, true, false]);
    }
}
