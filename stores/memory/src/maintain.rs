//! The upkeep of logs, each call one atomic step of the server.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::kit::{PRUNE_ROWS_MAX, PRUNE_YOUNG_MAX, rebase_not_needed};
use postbox_core::{Changed, Event, LogName, Maintain, Prune, Result, Routed, Seq, State as EventState};

use crate::state::{Data, DeliveryRow, LogState, Reader, State};
use crate::{MemoryStore, Server};

#[async_trait]
impl Maintain for MemoryStore {
    async fn create_log(&self, log: &LogName) -> Result<()> {
        self.server.state("create_log")?.data.logs.entry(log.clone()).or_default();
        Ok(())
    }

    async fn note_unrouted(&self, log: &LogName) -> Result<Routed> {
        let log = log.clone();
        self.call("note_unrouted", None, move |server| server.note_unrouted(&log)).await
    }

    async fn prune(&self, log: &LogName, prune: &Prune) -> Result<Changed> {
        let (log, prune) = (log.clone(), prune.clone());
        self.call("prune", None, move |server| server.prune(&log, &prune)).await
    }

    async fn time(&self) -> Result<Timestamp> {
        Ok(self.server.clock.now())
    }

    async fn check_receiving(&self) -> Result<()> {
        self.server.state("check_receiving").map(drop)
    }

    async fn check_integrity(&self) -> Result<()> {
        self.server.state("check_integrity").map(drop)
    }

    async fn rebase(&self) -> Result<()> {
        Err(rebase_not_needed())
    }
}

impl Server {
    fn note_unrouted(&self, name: &LogName) -> Result<Routed> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let mut state = self.state("note_unrouted")?;
        state.data.log("note_unrouted", name)?;
        let Data { logs, readers, .. } = &mut state.data;
        let log = logs.get_mut(name).expect("looked up above");
        let readers: Vec<&mut Reader> = readers.values_mut().filter(|it| it.subscription.log == *name).collect();
        if readers.is_empty() || readers.iter().any(|reader| reader.is_unsure(monotonic)) {
            return Ok(Routed::default());
        }
        let found: Vec<i64> = log
            .committed()
            .filter(|(_, commit, _)| *commit > log.routed)
            .filter(|(seq, commit, event)| {
                is_left_out(log, readers.iter().map(|reader| &**reader), *seq, *commit, event)
            })
            .map(|(seq, _, _)| seq)
            .collect();
        let unrouted = found.len() as u64;
        log.unrouted.extend(found);
        log.routed = log.commit_last;
        for reader in readers {
            let of = |seq: &i64| log.rows.get(seq).and_then(|row| Some((*seq, row.commit?, &row.event)));
            // Events before its start stay unrouted, and events it is about to read need no row.
            let wanted: Vec<(i64, u64, &Event)> = log
                .unrouted
                .iter()
                .filter_map(of)
                .filter(|(seq, commit, event)| reader.is_given(*seq, *commit, event))
                .collect();
            let passed = wanted.iter().filter(|(seq, commit, event)| !reader.takes(*seq, *commit, event));
            let rows: Vec<(i64, DeliveryRow)> =
                passed.map(|(seq, _, event)| (*seq, reader.row_left(*seq, event, now))).collect();
            let routed: Vec<i64> = wanted.iter().map(|(seq, _, _)| *seq).collect();
            reader.sent.extend(rows.iter().map(|(seq, _)| *seq));
            reader.send_again(&rows);
            log.unrouted.retain(|seq| !routed.contains(seq));
        }
        State::flush_and_wake(state);
        Ok(Routed { unrouted, more: false })
    }

    fn prune(&self, log: &LogName, prune: &Prune) -> Result<Changed> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let oldest_kept = now.checked_sub(prune.older_than).unwrap_or(Timestamp::MIN);
        if !prune.dry_run {
            _ = self.note_unrouted(log)?;
        }
        let mut state = self.state("prune")?;
        let of_log = state.data.log("prune", log)?;
        let readers: Vec<&Reader> =
            state.data.readers.values().filter(|reader| reader.subscription.log == *log).collect();
        if readers.is_empty() || prune.limit == Some(0) {
            return Ok(Changed::default());
        }
        let code = prune.code.as_deref();
        // Events not yet marked unrouted. Only a dry run counts them, because it marks none itself.
        let counts_beyond = prune.dry_run && !readers.iter().any(|reader| reader.is_unsure(monotonic));
        let is_unrouted = |seq, commit, event: &Event| {
            let is_left_out = || is_left_out(of_log, readers.iter().copied(), seq, commit, event);
            of_log.unrouted.contains(&seq) || (commit > of_log.routed && is_left_out())
        };
        let (mut gone, mut looked, mut young, mut next) = (Vec::new(), 0, 0, None);
        for (seq, commit, event) in
            of_log.committed().filter(|(seq, _, _)| prune.after.is_none_or(|after| *seq > after.0))
        {
            if event.created_at > oldest_kept {
                young += usize::from(event.created_at <= now);
            } else if (commit <= of_log.routed || counts_beyond)
                && prune.which.mean_event(Some(event))
                && prune.unrouted == is_unrouted(seq, commit, event)
                // About to be handed over to a subscription.
                && !(prune.unrouted && readers.iter().any(|reader| reader.is_given(seq, commit, event)))
                && readers.iter().all(|reader| reader.is_done_with(seq, commit, event))
                && (code.is_none() || readers.iter().any(|reader| reader.took_out(seq, code)))
            {
                gone.push(seq);
            }
            looked += 1;
            if young == PRUNE_YOUNG_MAX || prune.limit == Some(gone.len()) {
                break;
            }
            if looked == PRUNE_ROWS_MAX {
                next = Some(Seq(seq));
                break;
            }
        }
        let changed = Changed { count: gone.len() as u64, next };
        if prune.dry_run {
            return Ok(changed);
        }
        for seq in &gone {
            for reader in state.data.readers.values_mut().filter(|reader| reader.subscription.log == *log) {
                reader.take(*seq);
                reader.sent.remove(seq);
            }
            state.data.logs.get_mut(log).expect("looked up above").remove(*seq);
        }
        state.flush();
        Ok(changed)
    }
}

impl Reader {
    /// Returns whether this subscription does not want an event, or has passed it and no longer
    /// needs it.
    fn is_done_with(&self, seq: i64, commit: u64, event: &Event) -> bool {
        (!self.wants(event) || self.has_passed(seq, commit, event))
            && self.delivery(seq).is_none_or(|row| row.state == EventState::Discarded)
    }

    /// Returns whether an event was discarded in this subscription with this code.
    fn took_out(&self, seq: i64, code: Option<&str>) -> bool {
        self.delivery(seq).is_some_and(|row| row.state == EventState::Discarded && row.code.as_deref() == code)
    }

    /// Returns whether it gets an event that nobody wanted, now that it is asked again.
    fn is_given(&self, seq: i64, commit: u64, event: &Event) -> bool {
        self.wants(event) && self.is_judged(seq, commit, event)
    }
}

/// Returns whether a filter left the event out of every stream, not only every subscription's
/// start.
fn is_left_out<'a>(
    log: &LogState,
    readers: impl Iterator<Item = &'a Reader> + Clone,
    seq: i64,
    commit: u64,
    event: &Event,
) -> bool {
    readers.clone().all(|reader| reader.state_of(log, seq, commit, event) == EventState::Skipped)
        && readers.clone().any(|reader| reader.is_judged(seq, commit, event))
}

impl Reader {
    /// Returns whether it is unknown what a held lane will take next, because it has not taken its
    /// new filter yet.
    fn is_unsure(&self, monotonic: Duration) -> bool {
        self.lanes.iter().any(|lane| lane.revision != self.revision() && !lane.is_free(monotonic))
    }
}
