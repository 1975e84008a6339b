//! `postbox list --state STATE`.

use postbox_core::{Criteria, ListQuery, Record, State, SubscriptionName};
use postbox_server::status::RecordJson;
use postbox_server::text::{cut, estimated};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;
use crate::stores::{self, Note, OfStore, ask_each};

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
    pub(super) correlation: Option<String>,
}

pub(super) async fn run(contexts: &[Context], wanted: &Wanted, json: bool) -> Result<(), Failure> {
    let asked = ask_each(contexts, |context| records(context, wanted)).await;
    let mut records: Vec<(&Context, SubscriptionName, Record)> = Vec::new();
    for (context, (of_store, notes)) in asked.answers {
        notes.iter().filter(|note| !json || note.in_json).for_each(|note| context.note(&note.text));
        records.extend(of_store.into_iter().map(|(name, record)| (context, name, record)));
    }
    records.truncate(wanted.limit);
    if json {
        if asked.ended.is_ok() || contexts.len() > 1 {
            let all = records.iter();
            let all = all.map(|(context, name, record)| OfStore::new(context, RecordJson::new(name, record)));
            output::json(&all.collect::<Vec<_>>())?;
        }
        return asked.ended;
    }
    if records.is_empty() {
        asked.ended?;
        output::note(&format!("nothing is {}", wanted.state));
        return Ok(());
    }
    let terminal = output::is_terminal();
    stores::rows(
        &HEAD,
        records.iter().map(|(context, name, record)| (*context, row(name, record, terminal))).collect(),
    )?;
    if records.len() == wanted.limit {
        output::note(&format!("there may be more than these {}: --limit NUMBER", wanted.limit));
    }
    asked.ended
}

type Found = (Vec<(SubscriptionName, Record)>, Vec<Note>);

/// What one store has of it, and remarks.
async fn records(context: &Context, wanted: &Wanted) -> Result<Found, Failure> {
    let store = context.store().await?;
    let infos = context.some_registered(store.as_ref()).await?;
    let mut records: Vec<(SubscriptionName, Record)> = Vec::new();
    for info in &infos {
        let mut query = ListQuery {
            subscription: info.name.clone(),
            state: wanted.state,
            which: wanted.which.clone(),
            code: wanted.code.clone(),
            correlation: wanted.correlation.clone(),
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
    let never_run = context.never_run(&infos).map(|name| Note::always(context.why_unread(name, &infos)));
    let mut notes: Vec<Note> = never_run.collect();
    if wanted.state == State::Pending {
        for (log, count) in context.unread(store.as_ref()).await? {
            notes.push(Note::for_people(format!(
                "nobody reads the {log}, so its {} event(s) are not shown: {}",
                estimated(count.events, count.is_estimate),
                context.reader_wanted(&log)
            )));
        }
    }
    Ok((records, notes))
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
