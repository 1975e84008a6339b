//! `postbox list --state STATE`.

use postbox_core::{Criteria, ListQuery, Record, State, SubscriptionName};
use postbox_server::status::RecordJson;
use postbox_server::text::{cut, estimated};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

/// Most records in one read of the store: bounds the memory of a long list.
const PAGE: usize = 500;
/// Widest error text in a table; `show` has the whole of it.
const ERROR_CHARS: usize = 80;

/// What to list.
pub(super) struct Wanted {
    pub(super) state: State,
    pub(super) limit: usize,
    pub(super) which: Criteria,
    pub(super) code: Option<String>,
}

pub(super) async fn run(context: &Context, wanted: Wanted, json: bool) -> Result<(), Failure> {
    let store = context.store().await?;
    let infos = context.some_registered(store.as_ref()).await?;
    let mut records: Vec<(SubscriptionName, Record)> = Vec::new();
    for info in &infos {
        let mut query = ListQuery {
            subscription: info.name.clone(),
            state: wanted.state,
            which: wanted.which.clone(),
            code: wanted.code.clone(),
            after: None,
            limit: 0,
        };
        while records.len() < wanted.limit {
            query.limit = (wanted.limit - records.len()).min(PAGE);
            let page = store.list(&query).await?;
            // A page may be short because its payloads are large; only an empty one is the end.
            let Some(last) = page.last() else { break };
            query.after = Some(last.seq);
            records.extend(page.into_iter().map(|record| (info.name.clone(), record)));
        }
    }
    context.never_run(&infos).for_each(|name| output::note(&context.why_unread(name, &infos)));
    if json {
        return output::json(&records.iter().map(|(name, record)| RecordJson::new(name, record)).collect::<Vec<_>>());
    }
    if wanted.state == State::Pending {
        for (log, count) in context.unread(store.as_ref()).await? {
            output::note(&format!(
                "nobody reads the {log}, so its {} event(s) are not shown: {}",
                estimated(count.events, count.is_estimate),
                context.reader_wanted(&log)
            ));
        }
    }
    if records.is_empty() {
        output::note(&format!("nothing is {}", wanted.state));
        return Ok(());
    }
    let terminal = output::is_terminal();
    let rows: Vec<Vec<String>> = records.iter().map(|(name, record)| row(name, record, terminal)).collect();
    output::rows(&HEAD, &rows)?;
    if records.len() == wanted.limit {
        output::note(&format!("there may be more than these {}: --limit NUMBER", wanted.limit));
    }
    Ok(())
}

pub(crate) const HEAD: [&str; 9] = ["id", "subscription", "state", "topic", "key", "attempts", "due", "code", "error"];

pub(crate) fn row(subscription: &SubscriptionName, record: &Record, terminal: bool) -> Vec<String> {
    let error = record.error.as_deref().unwrap_or("-");
    vec![
        record.event.id.to_string(),
        subscription.to_string(),
        record.state.to_string(),
        record.event.topic.to_string(),
        record.event.key.as_ref().map_or_else(|| "-".to_owned(), |key| key.to_string()),
        record.attempts.to_string(),
        record.due_at.map_or_else(|| "-".to_owned(), |at| format!("{at:.0}")),
        record.code.clone().unwrap_or_else(|| "-".to_owned()),
        if terminal { cut(error, ERROR_CHARS) } else { error.to_owned() },
    ]
}
