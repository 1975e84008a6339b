//! `postbox retry ID…` and `postbox retry --all`.

use postbox_core::{EventId, Selection, State, Store, SubscriptionInfo, TopicPattern};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

pub(super) async fn run(
    context: &Context,
    ids: Option<Vec<EventId>>,
    topic: Option<TopicPattern>,
    code: Option<String>,
    limit: Option<usize>,
) -> Result<(), Failure> {
    let store = context.store().await?;
    let infos = context.some_registered(store.as_ref()).await?;
    let mut retried = 0;
    for info in &infos {
        let left = limit.map(|limit| limit.saturating_sub(retried as usize));
        if left == Some(0) {
            break;
        }
        let selection = Selection { ids: ids.clone(), topic: topic.clone(), code: code.clone(), limit: left };
        retried += store.requeue(&info.name, &selection).await?;
    }
    if retried == 0
        && let Some(ids) = &ids
    {
        explain(store.as_ref(), &infos, ids).await?;
    }
    output::line(&format!("retried={retried}"))
}

/// Why naming an event changed nothing: it is not dead, which is no failure, or it is not there, which is one.
async fn explain(store: &dyn Store, infos: &[SubscriptionInfo], ids: &[EventId]) -> Result<(), Failure> {
    for id in ids {
        let mut known = false;
        for info in infos {
            let Some(record) = store.get(&info.name, *id).await? else { continue };
            known = true;
            let why = match record.state {
                State::Dispatched => "it was delivered already",
                State::Discarded => "it was taken out",
                State::Blocked => "it waits behind an earlier event of its key; retry that one",
                _ => "it is on its way",
            };
            output::note(&format!("{id} is {} in {}: {why}", record.state, info.name));
        }
        if !known {
            return Err(Failure::failed(format!("no log has an event {id}; it was never committed, or was pruned")));
        }
    }
    Ok(())
}
