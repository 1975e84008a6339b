//! `postbox retry ID…` and `postbox retry --all`.

use std::collections::VecDeque;

use postbox_core::limits::CHANGE_EVENTS_MAX;
use postbox_core::{
    Change, Disposition, EventId, Headers, ListQuery, Record, Selection, State, Store, SubscriptionInfo,
};

use super::named::{Named, Stand};
use super::steps::Steps;
use crate::context::Context;
use crate::failure::Failure;

/// Most events read ahead per subscription and state, to find the oldest of all.
const PAGE: usize = 100;

pub(super) async fn run(context: &Context, wanted: Selection, json: bool) -> Result<(), Failure> {
    let store = context.store_to_change().await?;
    let infos = context.some_registered(store.as_ref()).await?;
    let mut steps = Steps::begin("retried", wanted.dry_run, json, wanted.limit);
    let named = Named::look(store.as_ref(), &infos, wanted.ids.as_deref().unwrap_or_default(), stand).await?;
    let ended = match (&wanted.ids, wanted.limit) {
        (Some(ids), _) => by_id(store.as_ref(), &infos, ids, &wanted, &mut steps).await,
        (None, Some(limit)) if infos.len() > 1 => {
            oldest_of_all(store.as_ref(), &infos, &wanted, limit, &mut steps).await
        }
        (None, _) => of_each(store.as_ref(), &infos, &wanted, &mut steps).await,
    };
    named.end(context, &infos, steps.count(), ended, |ended| steps.end(ended))
}

async fn by_id(
    store: &dyn Store,
    infos: &[SubscriptionInfo],
    ids: &[EventId],
    wanted: &Selection,
    steps: &mut Steps,
) -> Result<(), Failure> {
    for ids in ids.chunks(CHANGE_EVENTS_MAX) {
        of_each(store, infos, &Selection { ids: Some(ids.to_vec()), ..wanted.clone() }, steps).await?;
    }
    Ok(())
}

async fn of_each(
    store: &dyn Store,
    infos: &[SubscriptionInfo],
    wanted: &Selection,
    steps: &mut Steps,
) -> Result<(), Failure> {
    for info in infos {
        steps.take(wanted.clone(), async |selection| store.change(&info.name, &Change::Retry, selection).await).await?;
    }
    Ok(())
}

/// Retries the oldest events across several subscriptions, by the time of their append. The store
/// applies a limit within one subscription only, so one with many dead events would use up the
/// limit before the next one gets its turn.
async fn oldest_of_all(
    store: &dyn Store,
    infos: &[SubscriptionInfo],
    wanted: &Selection,
    limit: usize,
    steps: &mut Steps,
) -> Result<(), Failure> {
    let mut heads = Vec::new();
    for (place, info) in infos.iter().enumerate() {
        for state in [State::Dead, State::Retrying] {
            let (which, code) = (wanted.which.clone(), wanted.code.clone());
            let limit = limit.min(PAGE);
            let query = ListQuery {
                subscription: info.name.clone(),
                state: Some(state),
                which,
                code,
                headers: Headers::new(),
                after: None,
                limit,
                payloads: false,
            };
            let mut ahead = Ahead { place, query, page: VecDeque::new() };
            ahead.fill(store).await?;
            heads.push(ahead);
        }
    }
    let limit = limit as u64;
    while steps.count() < limit {
        let left = usize::try_from(limit - steps.count()).unwrap_or(usize::MAX);
        let found = next_of_all(store, &mut heads, infos.len(), left.min(CHANGE_EVENTS_MAX)).await?;
        if found.iter().all(Vec::is_empty) {
            break;
        }
        // An event that is due already is not changed and does not count; then the search goes on.
        for (info, ids) in infos.iter().zip(found).filter(|(_, ids)| !ids.is_empty()) {
            let selection = Selection {
                ids: Some(ids),
                code: wanted.code.clone(),
                dry_run: wanted.dry_run,
                ..Selection::default()
            };
            steps.take(selection, async |selection| store.change(&info.name, &Change::Retry, selection).await).await?;
        }
    }
    Ok(())
}

/// Returns the next oldest events, grouped by subscription.
async fn next_of_all(
    store: &dyn Store,
    heads: &mut [Ahead],
    subscriptions: usize,
    count: usize,
) -> Result<Vec<Vec<EventId>>, Failure> {
    let mut found = vec![Vec::new(); subscriptions];
    for _ in 0..count {
        let waiting = heads.iter_mut().filter(|ahead| !ahead.page.is_empty());
        let Some(oldest) = waiting.min_by_key(|ahead| ahead.page.front().map(age)) else { break };
        found[oldest.place].extend(oldest.page.pop_front().map(|record| record.event.id));
        if oldest.page.is_empty() {
            oldest.fill(store).await?;
        }
    }
    Ok(found)
}

/// Positions in two logs cannot be compared; times of the store's clock can.
fn age(record: &Record) -> (jiff::Timestamp, i64) {
    (record.event.created_at, record.seq.0)
}

/// The next events of one subscription and state, oldest first.
struct Ahead {
    place: usize,
    query: ListQuery,
    page: VecDeque<Record>,
}

impl Ahead {
    /// Reads the next page. Only an empty page is the end.
    async fn fill(&mut self, store: &dyn Store) -> Result<(), Failure> {
        self.page = store.list(&self.query).await?.into();
        self.query.after = self.page.back().map(|record| record.seq).or(self.query.after);
        Ok(())
    }
}

/// Returns what a retry can do to this event.
fn stand(record: &Record) -> Stand {
    let why = match record.state {
        // No relay has read it yet, so its turn in the log comes first.
        State::Dead if record.code.as_deref() == Some(Disposition::MARKED_DEAD) => {
            return Stand::MayMove(
                "it was marked dead before a relay read it; a relay has to pass it first".to_owned(),
            );
        }
        State::Dead => return Stand::Moves,
        // It may be due already, and then a retry changes nothing.
        State::Retrying => return Stand::MayMove("it is being retried already".to_owned()),
        State::Dispatched => "it was delivered already; `postbox replay` sends it again",
        State::Skipped | State::Unrouted => "the subscription did not want it; `postbox replay` sends it",
        State::Discarded => "discarded events are not sent again",
        State::Blocked => "it waits behind an earlier event of its key; retry that one",
        State::Pending | State::Scheduled => "it is pending, and is delivered by itself",
    };
    Stand::Stays(why.to_owned())
}
