//! `postbox list --state conflict`: messages rejected because their id is known with another body.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use postbox_core::limits::LIST_RECORDS_MAX;
use postbox_core::{Conflict, LogName, hex};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;
use crate::stores::{self, OfStore, ask_each};

/// Hexadecimal digits of a digest shown in a table: enough to tell two apart. JSON has all of them.
const DIGITS: usize = 12;

pub(super) async fn list(contexts: &[Context], limit: usize, json: bool) -> Result<(), Failure> {
    if contexts.iter().any(|context| context.only.is_some()) {
        return Err(Failure::usage(
            "a conflict belongs to no subscription: it never became an event; leave --subscription out, or narrow by --log",
        ));
    }
    let latest = async |context: &Context| match &context.log {
        None => Ok((context.store().await?.conflicts(limit).await?, false)),
        Some(log) => of_log(context, log, limit).await,
    };
    let asked = ask_each(contexts, latest).await;
    let is_answered = asked.is_answered();
    let mut conflicts: Vec<(&Context, Conflict)> = Vec::new();
    let mut is_cut = false;
    for (context, (of_store, is_cut_here)) in asked.answers {
        is_cut |= is_cut_here;
        conflicts.extend(of_store.into_iter().map(|conflict| (context, conflict)));
    }
    if contexts.len() > 1 {
        conflicts.sort_by_key(|(_, conflict)| Reverse(conflict.last_at));
        conflicts.truncate(limit);
    }
    if json {
        if is_answered {
            let all = conflicts.iter().map(|(context, conflict)| OfStore::new(context, conflict));
            output::json(&all.collect::<Vec<_>>())?;
        }
        return asked.ended;
    }
    if conflicts.is_empty() {
        asked.ended?;
        if !is_cut {
            output::note("no message came with a known id and another body");
        }
        return Ok(());
    }
    let head = ["message id", "source", "tenant", "times", "first", "last", "stored sha256", "refused sha256"];
    stores::rows(&head, conflicts.iter().map(|(context, conflict)| (*context, row(conflict))).collect())?;
    asked.ended
}

/// The latest conflicts of one log. A conflict names its source and not its log, so the
/// configuration says which log that is. Conflicts of sources that are not configured are counted
/// and reported, not hidden. Also returns whether there may be more, older than what a store lists.
async fn of_log(context: &Context, log: &LogName, limit: usize) -> Result<(Vec<Conflict>, bool), Failure> {
    let store = context.store().await?;
    let log_of = |conflict: &Conflict| {
        context.config.sources.iter().find(|source| source.name == conflict.source).map(|source| &source.log)
    };
    let mut wanted = limit.min(LIST_RECORDS_MAX);
    loop {
        let mut conflicts = store.conflicts(wanted).await?;
        let all = conflicts.len() < wanted;
        let strangers: BTreeSet<String> = conflicts
            .iter()
            .filter(|conflict| log_of(conflict).is_none())
            .map(|conflict| conflict.source.to_string())
            .collect();
        conflicts.retain(|conflict| log_of(conflict) == Some(log));
        conflicts.truncate(limit);
        if all || conflicts.len() == limit || wanted == LIST_RECORDS_MAX {
            if !strangers.is_empty() {
                let strangers = strangers.into_iter().collect::<Vec<_>>().join(", ");
                context.note(&format!(
                    "the configuration has no source {strangers}, so the log of its conflicts is unknown; leave --log out to see them"
                ));
            }
            let is_cut = !all && conflicts.len() < limit;
            if is_cut {
                context.note(&format!(
                    "only the latest {wanted} conflicts of all logs were looked at, and older ones may be of the {log}; \
                     find them by their source, in SQL: they are in the table conflict (SQLite: postbox_conflict)"
                ));
            }
            return Ok((conflicts, is_cut));
        }
        // Conflicts of other logs were among the latest: read further back.
        wanted = wanted.saturating_mul(2).min(LIST_RECORDS_MAX);
    }
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
