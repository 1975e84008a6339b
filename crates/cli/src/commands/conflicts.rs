//! `postbox list --state conflict`: message ids that came again with another body, and were kept out.

use std::collections::BTreeSet;

use postbox_core::{Conflict, LogName};
use serde::Serialize;

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

/// Hexadecimal digits of a digest in a table: enough to tell two apart. JSON has them all.
const DIGITS: usize = 12;

#[derive(Serialize)]
struct ConflictJson<'a> {
    source: &'a str,
    tenant: Option<&'a str>,
    message_id: &'a str,
    times: u64,
    first_at: String,
    last_at: String,
    digest_stored: String,
    digest_refused: String,
}

pub(super) async fn list(context: &Context, limit: usize, json: bool) -> Result<(), Failure> {
    if context.only.is_some() {
        return Err(Failure::usage(
            "a conflict belongs to no subscription: it never became an event; leave --subscription out, or narrow by --log",
        ));
    }
    let conflicts = match &context.log {
        None => context.store().await?.conflicts(limit).await?,
        Some(log) => of_log(context, log, limit).await?,
    };
    if json {
        return output::json(&conflicts.iter().map(to_json).collect::<Vec<_>>());
    }
    if conflicts.is_empty() {
        output::note("no message came with a known id and another body");
        return Ok(());
    }
    let head = ["message id", "source", "tenant", "times", "first", "last", "stored sha256", "refused sha256"];
    output::rows(&head, &conflicts.iter().map(row).collect::<Vec<_>>())
}

/// The latest of one log. The record names the source and not the log, so it is the configuration that says which log a source stores into; what
/// came from a source that is not in it is counted and told, not hidden.
async fn of_log(context: &Context, log: &LogName, limit: usize) -> Result<Vec<Conflict>, Failure> {
    let store = context.store().await?;
    let log_of = |conflict: &Conflict| {
        context.config.sources.iter().find(|source| source.name == conflict.source).map(|source| &source.log)
    };
    let mut wanted = limit;
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
        if all || conflicts.len() == limit {
            if !strangers.is_empty() {
                let strangers = strangers.into_iter().collect::<Vec<_>>().join(", ");
                output::note(&format!(
                    "the configuration has no source {strangers}, so nobody knows which log its conflicts are of; leave --log out to see them"
                ));
            }
            return Ok(conflicts);
        }
        // Others were among the latest: look further back.
        wanted = wanted.saturating_mul(2);
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

fn to_json(conflict: &Conflict) -> ConflictJson<'_> {
    ConflictJson {
        source: conflict.source.as_str(),
        tenant: conflict.tenant.as_deref(),
        message_id: &conflict.message_id,
        times: conflict.times,
        first_at: conflict.first_at.to_string(),
        last_at: conflict.last_at.to_string(),
        digest_stored: hex(&conflict.digest_stored),
        digest_refused: hex(&conflict.digest_refused),
    }
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
