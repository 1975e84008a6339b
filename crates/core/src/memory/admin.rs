//! What an operator changes: each one atomic step of the server.

use std::collections::HashSet;
use std::time::Duration;

use super::state::{Data, DeliveryRow, LogState, Reader, State};
use super::{MemoryStore, Server};
use crate::admin::{Admin, Changed, Replay, Replayed, Routed, Selection};
use crate::error::Result;
use crate::event::{Event, EventId, Seq};
use crate::inspect::Pause;
use crate::kit::{PRUNE_ROWS_MAX, PRUNE_YOUNG_MAX, rebase_not_needed};
use crate::names::{LogName, SubscriptionName};
use crate::state::State as EventState;
use crate::subscription::Ordering;
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

    async fn replay(&self, subscription: &SubscriptionName, replay: &Replay) -> Result<Replayed> {
        replay.validate()?;
        let (subscription, replay) = (subscription.clone(), replay.clone());
        self.call("replay", None, move |server| server.replay(&subscription, &replay)).await
    }

    async fn note_unrouted(&self, log: &LogName) -> Result<Routed> {
        let log = log.clone();
        self.call("note_unrouted", None, move |server| server.note_unrouted(&log)).await
    }

    async fn give_up_unrouted(&self, log: &LogName, older_than: Duration) -> Result<u64> {
        let log = log.clone();
        self.call("give_up_unrouted", None, move |server| server.give_up_unrouted(&log, older_than)).await
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
            reader.replays = reader.replays.max(row.replays);
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

    fn replay(&self, subscription: &SubscriptionName, replay: &Replay) -> Result<Replayed> {
        let now = self.clock.now();
        let mut state = self.state("replay")?;
        let (reader, log) = state.data.reader_mut("replay", subscription)?;
        let last = log.committed().last().map_or(0, |(seq, _, _)| seq);
        let through = replay.through.map_or(last, |through| through.0.min(last));
        let is_meant = |seq: i64, commit: u64, event: &Event| {
            use EventState::{Dispatched, Skipped, Unrouted};
            let state = reader.state_of(log, seq, commit, event);
            replay.means(Seq(seq), event)
                && seq <= through
                && (replay.ids.is_some() || reader.wants(event))
                && matches!(state, Dispatched | Skipped | Unrouted)
        };
        let meant = log.committed().filter(|(seq, commit, event)| is_meant(*seq, *commit, event));
        let mut chosen: Vec<(i64, DeliveryRow)> = meant
            .map(|(seq, _, event)| (seq, DeliveryRow::new(reader.lane_of(event), event.key.clone(), now)))
            .collect();
        let all = chosen.len();
        chosen.truncate(replay.step_max());
        let next = chosen.last().filter(|_| chosen.len() < all).map(|(seq, _)| Seq(*seq));
        let skipped = |(seq, _): &&(i64, DeliveryRow)| {
            let row = &log.rows[seq];
            row.commit.is_some_and(|commit| !reader.takes(*seq, commit, &row.event))
        };
        let skipped: Vec<i64> = chosen.iter().filter(skipped).map(|(seq, _)| *seq).collect();
        reader.sent.extend(skipped);
        let name = reader.subscription.log.clone();
        reader.send_again(&chosen, now);
        let log = state.data.logs.get_mut(&name).expect("a subscription's log is never removed");
        chosen.iter().for_each(|(seq, _)| _ = log.unrouted.remove(seq));
        State::flush_and_wake(state);
        Ok(Replayed { count: chosen.len() as u64, next, through: Seq(through) })
    }

    fn note_unrouted(&self, name: &LogName) -> Result<Routed> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let mut state = self.state("note_unrouted")?;
        state.data.log("note_unrouted", name)?;
        let Data { logs, readers, .. } = &mut state.data;
        let log = logs.get_mut(name).expect("looked up above");
        let readers: Vec<&mut Reader> = readers.values_mut().filter(|it| it.subscription.log == *name).collect();
        // What a lane that is held will take next depends on when it takes its new filter.
        let is_unsure =
            |it: &&mut Reader| it.lanes.iter().any(|lane| lane.revision != it.revision() && !lane.is_free(monotonic));
        if readers.is_empty() || readers.iter().any(is_unsure) {
            return Ok(Routed::default());
        }
        let found: Vec<i64> = log
            .committed()
            .filter(|(_, commit, _)| *commit > log.routed)
            .filter(|(seq, commit, event)| {
                // Left out by a filter, and not only by the beginning of all who read.
                readers.iter().all(|reader| reader.state_of(log, *seq, *commit, event) == EventState::Skipped)
                    && readers.iter().any(|reader| reader.judged_by(*seq, *commit, event) > 0)
            })
            .map(|(seq, _, _)| seq)
            .collect();
        let unrouted = found.len() as u64;
        log.unrouted.extend(found);
        log.routed = log.commit_last;
        for reader in readers {
            let of = |seq: &i64| log.rows.get(seq).and_then(|row| Some((*seq, row.commit?, &row.event)));
            // What lies before its beginning stays, and what it is about to read goes by itself.
            let wanted: Vec<(i64, u64, &Event)> = log
                .unrouted
                .iter()
                .filter_map(of)
                .filter(|(seq, commit, event)| reader.wants(event) && reader.judged_by(*seq, *commit, event) > 0)
                .collect();
            let passed = wanted.iter().filter(|(seq, commit, event)| !reader.takes(*seq, *commit, event));
            let rows: Vec<(i64, DeliveryRow)> = passed
                .map(|(seq, _, event)| (*seq, DeliveryRow::new(reader.lane_of(event), event.key.clone(), now)))
                .collect();
            let routed: Vec<i64> = wanted.iter().map(|(seq, _, _)| *seq).collect();
            reader.sent.extend(rows.iter().map(|(seq, _)| *seq));
            reader.send_again(&rows, now);
            log.unrouted.retain(|seq| !routed.contains(seq));
        }
        State::flush_and_wake(state);
        Ok(Routed { unrouted, more: false })
    }

    fn give_up_unrouted(&self, log: &LogName, older_than: Duration) -> Result<u64> {
        let oldest_kept = self.clock.now().checked_sub(older_than).unwrap_or(Timestamp::MIN);
        let mut state = self.state("give_up_unrouted")?;
        state.data.log("give_up_unrouted", log)?;
        let LogState { unrouted, rows, .. } = state.data.logs.get_mut(log).expect("looked up above");
        let before = unrouted.len();
        unrouted.retain(|seq| rows.get(seq).is_some_and(|row| row.event.created_at > oldest_kept));
        let given_up = before - unrouted.len();
        state.flush();
        Ok(given_up as u64)
    }

    fn prune(&self, log: &LogName, older_than: Duration, after: Option<Seq>) -> Result<Changed> {
        let now = self.clock.now();
        let oldest_kept = now.checked_sub(older_than).unwrap_or(Timestamp::MIN);
        _ = self.note_unrouted(log)?;
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
            } else if commit <= of_log.routed
                && !of_log.unrouted.contains(&seq)
                && readers.iter().all(|reader| reader.is_done_with(seq, commit, event))
            {
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
                reader.sent.remove(seq);
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
    /// Gives events that were passed a row that is due now. Its replay is a number that no event of
    /// the subscription had before: a destination that remembers ids lets it through.
    fn send_again(&mut self, chosen: &[(i64, DeliveryRow)], now: Timestamp) {
        self.replays += 1;
        let ordered = self.subscription.ordering == Ordering::Key;
        for (seq, row) in chosen {
            let (state, replays) = (EventState::Retrying, self.replays);
            self.put(*seq, DeliveryRow { state, ordered, replays, due_at: Some(now), ..row.clone() });
        }
    }

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
            .filter(|(seq, commit, event)| self.state_of(log, *seq, *commit, event) == EventState::Pending)
            .map(|(seq, _, event)| (seq, DeliveryRow::new(self.lane_of(event), event.key.clone(), now)))
            .collect()
    }

    /// Whether this subscription has passed an event and needs it no more.
    fn is_done_with(&self, seq: i64, commit: u64, event: &Event) -> bool {
        self.has_passed(seq, commit, event) && self.delivery(seq).is_none_or(|row| row.state == EventState::Discarded)
    }
}
