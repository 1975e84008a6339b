//! What an operator changes: each one atomic step of the server.

use std::collections::HashSet;
use std::time::Duration;

use super::state::{DeliveryRow, LogState, Reader, State};
use super::{MemoryStore, Server};
use crate::admin::{Admin, Changed, Selection};
use crate::error::Result;
use crate::event::{Event, EventId, Seq};
use crate::inspect::Pause;
use crate::kit::{PRUNE_ROWS_MAX, PRUNE_YOUNG_MAX, rebase_not_needed};
use crate::names::{LogName, SubscriptionName};
use crate::state::State as EventState;
use async_trait::async_trait;
use jiff::Timestamp;

#[async_trait]
impl Admin for MemoryStore {
    async fn retry(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        selection.validate("retry")?;
        let (subscription, selection) = (subscription.clone(), selection.clone());
        self.call("retry", None, move |server| server.retry(&subscription, &selection)).await
    }

    async fn discard(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        selection.validate("discard")?;
        let (subscription, selection) = (subscription.clone(), selection.clone());
        self.call("discard", None, move |server| server.discard(&subscription, &selection)).await
    }

    async fn prune(&self, log: &LogName, older_than: Duration, after: Option<Seq>) -> Result<Changed> {
        let log = log.clone();
        self.call("prune", None, move |server| server.prune(&log, older_than, after)).await
    }

    async fn pause(&self, subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()> {
        let (subscription, pause) = (subscription.clone(), pause.cloned());
        self.call("pause", None, move |server| server.pause(&subscription, pause.clone())).await
    }

    async fn create_log(&self, log: &LogName) -> Result<()> {
        self.server.state("create_log")?.data.logs.entry(log.clone()).or_default();
        Ok(())
    }

    async fn check_receiving(&self) -> Result<()> {
        self.server.state("check_receiving").map(drop)
    }

    async fn rebase(&self) -> Result<()> {
        Err(rebase_not_needed())
    }
}

impl Server {
    fn retry(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        let now = self.clock.now();
        let mut state = self.state("retry")?;
        let (reader, log) = state.data.reader_mut("retry", subscription)?;
        let mut chosen = reader.select(log, selection, |row| match row.state {
            EventState::Dead => true,
            EventState::Retrying => !row.is_due(now),
            _ => false,
        });
        let changed = cut_to_step(&mut chosen, selection);
        for (seq, row) in &chosen {
            let mut row = DeliveryRow { due_at: Some(now), updated_at: now, ..row.clone() };
            if row.state == EventState::Dead {
                row = DeliveryRow {
                    state: EventState::Retrying,
                    halt: false,
                    attempts: 0,
                    replays: row.replays + 1,
                    letter_at: None,
                    ..row
                };
            }
            reader.put(*seq, row);
        }
        State::flush_and_wake(state);
        Ok(changed)
    }

    fn discard(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        let now = self.clock.now();
        let mut state = self.state("discard")?;
        let (reader, log) = state.data.reader_mut("discard", subscription)?;
        let mut chosen = reader.select(log, selection, |row| row.state.may_become(EventState::Discarded));
        chosen.extend(reader.select_pending(log, selection, now));
        chosen.sort_by_key(|(seq, _)| *seq);
        let changed = cut_to_step(&mut chosen, selection);
        for (seq, row) in &chosen {
            let row = DeliveryRow { state: EventState::Discarded, due_at: None, updated_at: now, ..row.clone() };
            let key = row.key.clone();
            reader.put(*seq, row);
            if let Some(key) = key {
                reader.release_head(&key, now);
            }
        }
        State::flush_and_wake(state);
        Ok(changed)
    }

    fn prune(&self, log: &LogName, older_than: Duration, after: Option<Seq>) -> Result<Changed> {
        let now = self.clock.now();
        let oldest_kept = now.checked_sub(older_than).unwrap_or(Timestamp::MIN);
        let mut state = self.state("prune")?;
        let of_log = state.data.log("prune", log)?;
        let readers: Vec<&Reader> =
            state.data.readers.values().filter(|reader| reader.subscription.log == *log).collect();
        if readers.is_empty() {
            return Ok(Changed::default());
        }
        let (mut gone, mut looked, mut young, mut next) = (Vec::new(), 0, 0, None);
        for (seq, commit, event) in of_log.committed().filter(|(seq, _, _)| after.is_none_or(|after| *seq > after.0)) {
            if event.created_at > oldest_kept {
                young += 1;
            } else if readers.iter().all(|reader| reader.is_done_with(seq, commit, event)) {
                gone.push(seq);
            }
            looked += 1;
            if young == PRUNE_YOUNG_MAX {
                break;
            }
            if looked == PRUNE_ROWS_MAX {
                next = Some(Seq(seq));
                break;
            }
        }
        for seq in &gone {
            for reader in state.data.readers.values_mut().filter(|reader| reader.subscription.log == *log) {
                reader.take(*seq);
            }
            state.data.logs.get_mut(log).expect("looked up above").remove(*seq);
        }
        state.flush();
        Ok(Changed { count: gone.len() as u64, next })
    }

    fn pause(&self, subscription: &SubscriptionName, pause: Option<Pause>) -> Result<()> {
        let mut state = self.state("pause")?;
        state.data.reader_mut("pause", subscription)?.0.pause = pause;
        state.flush();
        Ok(())
    }
}

/// Cuts what was chosen, oldest first, to one step.
fn cut_to_step(chosen: &mut Vec<(i64, DeliveryRow)>, selection: &Selection) -> Changed {
    let all = chosen.len();
    chosen.truncate(selection.step_max());
    let next = chosen.last().filter(|_| chosen.len() < all).map(|(seq, _)| Seq(*seq));
    Changed { count: chosen.len() as u64, next }
}

impl Reader {
    /// The delivery rows a person means, oldest first.
    fn select(
        &self,
        log: &LogState,
        selection: &Selection,
        wanted: impl Fn(&DeliveryRow) -> bool,
    ) -> Vec<(i64, DeliveryRow)> {
        let is_meant = |(seq, row): &(i64, &DeliveryRow)| {
            let event = log.rows.get(seq).map(|row| &row.event);
            let topic = event.map(|event| event.topic.as_str());
            let by_id = |ids: &Vec<EventId>| event.is_some_and(|event| ids.contains(&event.id));
            selection.after.is_none_or(|after| *seq > after.0)
                && wanted(row)
                && selection.means(topic, row.code.as_deref())
                && selection.ids.as_ref().is_none_or(by_id)
        };
        self.deliveries().filter(is_meant).map(|(seq, row)| (seq, row.clone())).collect()
    }

    /// Pending events named by id, as the rows they are about to get.
    fn select_pending(&self, log: &LogState, selection: &Selection, now: Timestamp) -> Vec<(i64, DeliveryRow)> {
        let ids: HashSet<EventId> = selection.ids.iter().flatten().copied().collect();
        ids.iter()
            .filter_map(|id| log.ids.get(id))
            .filter_map(|seq| Some((*seq, log.rows[seq].commit?, &log.rows[seq].event)))
            .filter(|(_, _, event)| self.wants(event) && selection.means(Some(event.topic.as_str()), None))
            .filter(|(seq, commit, event)| self.state_of(*seq, *commit, event) == EventState::Pending)
            .map(|(seq, _, event)| (seq, DeliveryRow::new(self.lane_of(event), event.key.clone(), now)))
            .collect()
    }

    /// Whether this subscription has passed an event and needs it no more.
    fn is_done_with(&self, seq: i64, commit: u64, event: &Event) -> bool {
        let passed = self.lanes[usize::from(self.lane_of(event))].has_passed(seq, commit);
        passed && self.delivery(seq).is_none_or(|row| row.state == EventState::Discarded)
    }
}
