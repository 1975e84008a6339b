//! Changes by an operator, each one atomic step of the server.

use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::kit::check_lanes;
use postbox_core::limits::ERROR_BYTES_MAX;
use postbox_core::{
    Admin, Change, Changed, Disposition, Event, EventId, Ordering, Pause, Replay, Replayed, ResetPlan, ResetTo, Result,
    Selection, Seq, State as EventState, SubscriptionName,
};

use crate::state::{DeliveryRow, LogState, Reader, State};
use crate::{MemoryStore, Server};

#[async_trait]
impl Admin for MemoryStore {
    async fn change(&self, subscription: &SubscriptionName, change: &Change, selection: &Selection) -> Result<Changed> {
        let operation = change.operation();
        selection.validate(operation)?;
        let (subscription, change, selection) = (subscription.clone(), change.clone(), selection.clone());
        let step = move |server: &Server| match change {
            Change::Retry => server.retry(&subscription, &selection),
            Change::Discard | Change::MarkDead { .. } => server.end(&subscription, &change, &selection),
        };
        self.call(operation, None, step).await
    }

    async fn replay(&self, subscription: &SubscriptionName, replay: &Replay) -> Result<Replayed> {
        replay.validate()?;
        let (subscription, replay) = (subscription.clone(), replay.clone());
        self.call("replay", None, move |server| server.replay(&subscription, &replay)).await
    }

    async fn pause(&self, subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()> {
        let (subscription, pause) = (subscription.clone(), pause.cloned());
        self.call("pause", None, move |server| server.pause(&subscription, pause.clone())).await
    }

    async fn rename(&self, subscription: &SubscriptionName, generation: i64, to: &SubscriptionName) -> Result<()> {
        let (subscription, to) = (subscription.clone(), to.clone());
        self.call("rename", None, move |server| server.rename(&subscription, generation, &to)).await
    }

    async fn remove(&self, subscription: &SubscriptionName, generation: i64) -> Result<()> {
        let subscription = subscription.clone();
        self.call("remove", None, move |server| server.remove(&subscription, generation)).await
    }

    async fn reset(&self, subscription: &SubscriptionName, to: ResetTo, stamp: Option<&str>) -> Result<ResetPlan> {
        let (subscription, stamp) = (subscription.clone(), stamp.map(str::to_owned));
        self.call("reset", None, move |server| server.reset(&subscription, to, stamp.as_deref())).await
    }

    async fn set_lanes(&self, subscription: &SubscriptionName, lanes: u16) -> Result<()> {
        check_lanes("set_lanes", subscription, lanes)?;
        let subscription = subscription.clone();
        self.call("set_lanes", None, move |server| server.set_lanes(&subscription, lanes)).await
    }
}

impl Server {
    fn retry(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        let now = self.clock.now();
        let mut state = self.state("retry")?;
        let (reader, log) = state.data.reader_mut("retry", subscription)?;
        // Still ahead in the stream. If it were revived before its lane passes it, it would go out
        // twice.
        let is_ahead = |seq: i64, row: &DeliveryRow| {
            row.code.as_deref() == Some(Disposition::MARKED_DEAD)
                && log
                    .rows
                    .get(&seq)
                    .is_some_and(|it| it.commit.is_some_and(|commit| !reader.has_passed(seq, commit, &it.event)))
        };
        let mut chosen = reader.select(log, selection, now, |seq, row| match row.state {
            EventState::Dead => !is_ahead(seq, row),
            EventState::Retrying => !row.is_due(now),
            _ => false,
        });
        let changed = cut_to_step(&mut chosen, selection);
        if selection.dry_run {
            return Ok(changed);
        }
        for (seq, row) in &chosen {
            let mut row = DeliveryRow { due_at: Some(now), updated_at: now, ..row.clone() };
            if row.state == EventState::Dead {
                row = DeliveryRow {
                    state: EventState::Retrying,
                    halt: false,
                    attempts: 0,
                    replays: row.replays + 1,
                    // It may crash a relay again, so it goes alone.
                    crashes: row.crashes.min(1),
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

    /// Discards events, or marks them dead.
    fn end(&self, subscription: &SubscriptionName, change: &Change, selection: &Selection) -> Result<Changed> {
        let now = self.clock.now();
        let mut state = self.state(change.operation())?;
        let (reader, log) = state.data.reader_mut(change.operation(), subscription)?;
        let mut chosen = reader.select(log, selection, now, |_, row| change.takes(row.state));
        chosen.extend(reader.select_pending(log, change, selection, now));
        chosen.sort_by_key(|(seq, _)| *seq);
        let changed = cut_to_step(&mut chosen, selection);
        if selection.dry_run {
            return Ok(changed);
        }
        let (note, halt) = (change.note(selection), reader.subscription.halts());
        for (seq, row) in &chosen {
            let mut row = DeliveryRow { state: change.state(), due_at: None, updated_at: now, halt, ..row.clone() };
            row.code = change.code().map(str::to_owned).or(row.code);
            row.error = match (&note, row.error) {
                (Some(note), Some(before)) => {
                    Some(format!("{note}; before: {before}").chars().take(ERROR_BYTES_MAX).collect())
                }
                (note, before) => note.clone().or(before),
            };
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
            replay.means(Seq(seq), event, now)
                && seq <= through
                && (replay.ids.is_some() || reader.wants(event))
                && matches!(state, Dispatched | Skipped | Unrouted)
        };
        let meant = log.committed().filter(|(seq, commit, event)| is_meant(*seq, *commit, event));
        let mut chosen: Vec<(i64, DeliveryRow)> =
            meant.map(|(seq, _, event)| (seq, reader.row_left(seq, event, now))).collect();
        let all = chosen.len();
        chosen.truncate(replay.step_max());
        let next = chosen.last().filter(|_| chosen.len() < all).map(|(seq, _)| Seq(*seq));
        let replayed = Replayed { count: chosen.len() as u64, next, through: Seq(through) };
        if replay.dry_run {
            return Ok(replayed);
        }
        let skipped = |(seq, _): &&(i64, DeliveryRow)| {
            let row = &log.rows[seq];
            row.commit.is_some_and(|commit| !reader.takes(*seq, commit, &row.event))
        };
        let skipped: Vec<i64> = chosen.iter().filter(skipped).map(|(seq, _)| *seq).collect();
        reader.sent.extend(skipped);
        let name = reader.subscription.log.clone();
        reader.send_again(&chosen);
        let log = state.data.logs.get_mut(&name).expect("a subscription's log is never removed");
        chosen.iter().for_each(|(seq, _)| _ = log.unrouted.remove(seq));
        State::flush_and_wake(state);
        Ok(replayed)
    }

    fn pause(&self, subscription: &SubscriptionName, pause: Option<Pause>) -> Result<()> {
        let now = self.clock.now();
        let mut state = self.state("pause")?;
        let (reader, _) = state.data.reader_mut("pause", subscription)?;
        pause.iter().try_for_each(|pause| pause.validate(now))?;
        reader.pause = pause;
        state.flush();
        Ok(())
    }
}

/// Cuts the chosen rows, oldest first, to one step.
fn cut_to_step(chosen: &mut Vec<(i64, DeliveryRow)>, selection: &Selection) -> Changed {
    let all = chosen.len();
    chosen.truncate(selection.step_max());
    let next = chosen.last().filter(|_| chosen.len() < all).map(|(seq, _)| Seq(*seq));
    Changed { count: chosen.len() as u64, next }
}

impl Reader {
    /// Gives passed events the rows that were made for them. Their replay is a number that no event
    /// of the subscription had before, so a destination that remembers ids accepts them.
    pub(crate) fn send_again(&mut self, chosen: &[(i64, DeliveryRow)]) {
        self.replays += 1;
        for (seq, row) in chosen {
            self.put(*seq, DeliveryRow { replays: self.replays, ..row.clone() });
        }
    }

    /// Returns the selected delivery rows, oldest first.
    fn select(
        &self,
        log: &LogState,
        selection: &Selection,
        now: Timestamp,
        wanted: impl Fn(i64, &DeliveryRow) -> bool,
    ) -> Vec<(i64, DeliveryRow)> {
        let is_meant = |(seq, row): &(i64, &DeliveryRow)| {
            let event = log.rows.get(seq).map(|row| &row.event);
            let unchanged_for = Duration::try_from(now.duration_since(row.updated_at)).unwrap_or_default();
            let by_id = |ids: &Vec<EventId>| event.is_some_and(|event| ids.contains(&event.id));
            selection.after.is_none_or(|after| *seq > after.0)
                && wanted(*seq, row)
                && selection.which.mean_event(event)
                && selection.means_code(row.code.as_deref())
                && selection.means_state(row.state, row.held_key().is_some(), unchanged_for)
                && selection.ids.as_ref().is_none_or(by_id)
        };
        self.deliveries().filter(is_meant).map(|(seq, row)| (seq, row.clone())).collect()
    }

    /// Returns pending events named by id, as the rows they are about to get.
    fn select_pending(
        &self,
        log: &LogState,
        change: &Change,
        selection: &Selection,
        now: Timestamp,
    ) -> Vec<(i64, DeliveryRow)> {
        let takes = |event: &Event| event.deliver_at.is_none() || change.takes(EventState::Scheduled);
        let ids: HashSet<EventId> = selection.ids.iter().flatten().copied().collect();
        ids.iter()
            .filter_map(|id| log.ids.get(id))
            .filter_map(|seq| Some((*seq, log.rows[seq].commit?, &log.rows[seq].event)))
            .filter(|(_, _, event)| {
                self.wants(event) && selection.which.mean_event(Some(event)) && selection.means_unread() && takes(event)
            })
            .filter(|(seq, commit, event)| self.state_of(log, *seq, *commit, event) == EventState::Pending)
            .map(|(seq, _, event)| {
                let (ordered, replays) = (self.subscription.ordering == Ordering::Key, self.replay_of(seq));
                let row = DeliveryRow::new(self.lane_of(event), event.key.clone(), now);
                (seq, DeliveryRow { ordered, replays, ..row })
            })
            .collect()
    }
}
