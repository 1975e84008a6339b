//! `postbox discard` and `postbox mark-dead`, with `ID…` or `--all`.

use postbox_core::limits::CHANGE_EVENTS_MAX;
use postbox_core::{Change, Record, Selection, State};

use super::named::{Named, Stand};
use super::steps::Steps;
use crate::context::Context;
use crate::failure::Failure;

pub(super) async fn run(context: &Context, change: &Change, selection: Selection, json: bool) -> Result<(), Failure> {
    let store = context.store_to_change().await?;
    let infos = context.some_registered(store.as_ref()).await?;
    let mut names: Vec<&str> = infos.iter().map(|info| info.name.as_str()).collect();
    names.extend(context.never_run(&infos).map(|name| name.as_str()));
    let ([info], 1) = (infos.as_slice(), names.len()) else {
        let text = format!(
            "several subscriptions may want these events; name the one that must not get them: --subscription {}",
            names.join("|")
        );
        return Err(Failure::usage(text));
    };
    let word = if change.state() == State::Dead { "marked_dead" } else { "discarded" };
    let mut steps = Steps::begin(word, selection.dry_run, json, selection.limit);
    let step = async |selection: &Selection| store.change(&info.name, change, selection).await;
    let Some(ids) = selection.ids.clone() else {
        let ended = steps.take(selection, &step).await;
        return steps.end(ended);
    };
    let named = Named::look(store.as_ref(), &infos, &ids, |record| stand(change, record)).await?;
    let ended = async {
        for ids in ids.chunks(CHANGE_EVENTS_MAX) {
            steps.take(Selection { ids: Some(ids.to_vec()), ..selection.clone() }, &step).await?;
        }
        Ok(())
    };
    let ended = ended.await;
    named.end(context, &infos, steps.count(), ended, |ended| steps.end(ended))
}

/// Returns what the change can do to this event.
fn stand(change: &Change, record: &Record) -> Stand {
    let why = match record.state {
        State::Dead if change.state() == State::Dead => "it is dead already",
        State::Pending | State::Scheduled if !change.takes(State::Scheduled) && record.event.deliver_at.is_some() => {
            "it waits for its time; `postbox discard` cancels it"
        }
        State::Dispatched => "it was delivered already",
        State::Skipped | State::Unrouted => "the subscription did not want it",
        State::Discarded => "it was discarded already",
        State::Dead | State::Retrying | State::Blocked | State::Pending | State::Scheduled => return Stand::Moves,
    };
    Stand::Stays(why.to_owned())
}
