//! `postbox discard ID…` and `postbox discard --all`.

use postbox_core::Selection;
use postbox_core::limits::CHANGE_EVENTS_MAX;

use super::steps::Steps;
use crate::context::Context;
use crate::failure::Failure;
use crate::output;

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
    let wanted = ids.len() as u64;
    let ended = async {
        for ids in ids.chunks(CHANGE_EVENTS_MAX) {
            steps.take(Selection { ids: Some(ids.to_vec()), ..selection.clone() }, &discard).await?;
        }
        Ok(())
    };
    let ended = ended.await;
    let discarded = steps.count();
    if ended.is_ok() && discarded < wanted {
        output::note(&format!(
            "{} of {wanted} changed nothing: unknown, delivered already or taken out before (see `postbox show ID`)",
            wanted - discarded
        ));
    }
    steps.end(ended)
}
