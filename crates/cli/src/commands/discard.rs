//! `postbox discard ID…`.

use postbox_core::limits::CHANGE_EVENTS_MAX;
use postbox_core::{EventId, Selection};

use super::steps::Steps;
use crate::context::Context;
use crate::failure::Failure;
use crate::output;

pub(super) async fn run(context: &Context, ids: Vec<EventId>) -> Result<(), Failure> {
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
    let wanted = ids.len() as u64;
    let mut steps = Steps::begin("discarded");
    let ended = async {
        for ids in ids.chunks(CHANGE_EVENTS_MAX) {
            let selection = Selection { ids: Some(ids.to_vec()), ..Selection::default() };
            steps.take(selection, async |selection| store.discard(&info.name, selection).await).await?;
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
