//! `postbox list --state conflict`: messages rejected because their id is known with another body.

use std::cmp::Reverse;

use postbox_core::{Conflict, hex};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;
use crate::stores::{self, OfStore, ask_each};

/// Hexadecimal digits of a digest shown in a table: enough to tell two apart. JSON has all of them.
const DIGITS: usize = 12;

pub(super) async fn list(contexts: &[Context], limit: usize, json: bool) -> Result<(), Failure> {
    if contexts.iter().any(|context| context.only.is_some() || context.log.is_some()) {
        return Err(Failure::usage(
            "a conflict belongs to no log and no subscription: it never became an event; leave --log and --subscription \
             out: its column `source` says where it came from",
        ));
    }
    let latest = async |context: &Context| Ok(context.store().await?.conflicts(limit).await?);
    let asked = ask_each(contexts, latest).await;
    let is_answered = asked.is_answered();
    let mut conflicts: Vec<(&Context, Conflict)> = Vec::new();
    for (context, of_store) in asked.answers {
        conflicts.extend(of_store.into_iter().map(|conflict| (context, conflict)));
    }
    if contexts.len() > 1 {
        conflicts.sort_by_key(|(_, conflict)| Reverse(conflict.last_at));
        conflicts.truncate(limit);
    }
    if json {
        if is_answered {
            let all = conflicts.iter().map(|(context, conflict)| OfStore::new(context, conflict));
            output::json(&all.collect::<Vec<_>>());
        }
        return asked.ended;
    }
    if conflicts.is_empty() {
        asked.ended?;
        output::note("no message came with a known id and another body");
        return Ok(());
    }
    let head = ["message id", "source", "tenant", "times", "first", "last", "stored sha256", "refused sha256"];
    stores::rows(&head, conflicts.iter().map(|(context, conflict)| (*context, row(conflict))).collect());
    asked.ended
}

fn row(conflict: &Conflict) -> Vec<String> {
    let short = |digest: &[u8]| hex(digest).chars().take(DIGITS).collect();
    vec![
        conflict.message_id.clone(),
        conflict.source.to_string(),
        conflict.tenant.clone().unwrap_or_else(|| "-".into()),
        conflict.times.to_string(),
        format!("{:.0}", conflict.first_at),
        format!("{:.0}", conflict.last_at),
        short(&conflict.digest_stored),
        short(&conflict.digest_refused),
    ]
}
