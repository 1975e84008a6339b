//! `postbox discard ID…`.

use postbox_core::{EventId, Selection};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

pub(super) async fn run(context: &Context, ids: Vec<EventId>) -> Result<(), Failure> {
    let store = context.store().await?;
    let infos = context.some_registered(store.as_ref()).await?;
    let [info] = infos.as_slice() else {
        let names: Vec<&str> = infos.iter().map(|info| info.name.as_str()).collect();
        let text = format!(
            "several subscriptions may want these events; say which shall not get them: --subscription {}",
            names.join("|")
        );
        return Err(Failure::usage(text));
    };
    let wanted = ids.len() as u64;
    let discarded = store.discard(&info.name, &Selection { ids: Some(ids), ..Selection::default() }).await?;
    if discarded < wanted {
        output::note(&format!(
            "{} of {wanted} changed nothing: unknown, delivered already or taken out before (see `postbox show ID`)",
            wanted - discarded
        ));
    }
    output::line(&format!("discarded={discarded}"))
}
