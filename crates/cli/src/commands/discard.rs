//! `postbox discard ID…` and `postbox discard --all`.

use postbox_core::limits::CHANGE_EVENTS_MAX;
use postbox_core::{Record, Selection, State};

use super::named::{Named, Stand};
use super::steps::Steps;
use crate::context::Context;
use crate::failure::Failure;

pub(super) async fn run(context: &Context, selection: Selection, json: bool) -> Result<(), Failure> {
    let store = context.store().await?;
    let infos = context.some_registered(store.as_ref()).await?;
    let mut names: Vec<&str> = infos.iter().map(|info| info.name.as_str()).collect();
    names.extend(context.never_run(&infos).map(|name| name.as_str()));
    let ([info], 1) = (infos.as_slice(), names.len()) else {
        let text = format!(
            "several subscriptions may want these events; say which shall not get them: --subscription {}",
            names.join("|")
        );
        return Err(Failure::usage(text));
    };
    let mut steps = Steps::begin("discarded", selection.dry_run, json);
    let discard = async |selection: &Selection| store.discard(&info.name, selection).await;
    let Some(ids) = selection.ids.clone() else {
        let ended = steps.take(selection, &discard).await;
        return steps.end(ended);
    };
    let named = Named::look(store.as_ref(), &infos, &ids, stand).await?;
    let ended = async {
        for ids in ids.chunks(CHANGE_EVENTS_MAX) {
            steps.take(Selection { ids: Some(ids.to_vec()), ..selection.clone() }, &discard).await?;
        }
        Ok(())
    };
    let ended = ended.await;
    let nothing = ended.is_ok() && steps.count() == 0;
    if ended.is_ok() {
        named.explain(nothing);
    }
    if nothing && !named.are_known() {
        return named.known(context, &infos);
    }
    steps.end(ended)?;
    named.known(context, &infos)
}

/// What a discard can do.
fn stand(record: &Record) -> Stand {
    let why = match record.state {
        State::Dispatched => "it was delivered already",
        State::Skipped | State::Unrouted => "it was never meant to go out",
        State::Discarded => "it was taken out before",
        State::Dead | State::Retrying | State::Blocked | State::Pending | State::Scheduled => return Stand::Moves,
    };
    Stand::Stays(why.to_owned())
}
