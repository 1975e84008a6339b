//! `postbox list`, and `postbox list --state STATE`.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use postbox_core::{Criteria, Headers, ListQuery, Record, State, SubscriptionName};
use postbox_server::status::RecordJson;
use postbox_server::text::{cut, estimated};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;
use crate::stores::{self, OfStore, ask_each, together};

/// Most records per read of the store. Payloads are read for `--json` only, and are then in memory
/// together.
const PAGE: usize = 500;
/// Widest error text in a table; `show` prints all of it.
const ERROR_CHARS: usize = 80;

/// What to list.
pub(super) struct Wanted {
    pub(super) state: Option<State>,
    pub(super) limit: usize,
    pub(super) which: Criteria,
    pub(super) code: Option<String>,
    pub(super) headers: Headers,
}

pub(super) async fn run(contexts: &[Context], wanted: &Wanted, json: bool) -> Result<(), Failure> {
    let asked = ask_each(contexts, |context| records(context, wanted, json)).await;
    let is_answered = asked.is_answered();
    let mut records: Vec<(&Context, Option<SubscriptionName>, Record)> = Vec::new();
    let (mut is_noted, mut failures) = (false, Vec::new());
    for (context, (of_store, notes, ended)) in asked.answers {
        failures.extend(ended.err().map(|failure| (context, failure)));
        is_noted |= !notes.is_empty();
        notes.iter().for_each(|note| context.note(note));
        records.extend(of_store.into_iter().map(|(name, record)| (context, name, record)));
    }
    let ended = together(failures).and(asked.ended);
    first(&mut records, wanted, |(_, _, record)| record);
    if json {
        if is_answered {
            let all = records.iter();
            let all = all.map(|(context, name, record)| OfStore::new(context, RecordJson::new(name.as_ref(), record)));
            output::json(&all.collect::<Vec<_>>());
        }
        return ended;
    }
    if records.is_empty() {
        ended?;
        // Not if the log is unread, which a note has said.
        if !is_noted {
            output::note(&match wanted.state {
                Some(state) => format!("no event is in the state {state}"),
                None => "nothing is there".to_owned(),
            });
        }
        return Ok(());
    }
    let terminal = output::is_terminal();
    stores::rows(
        &HEAD,
        records.iter().map(|(context, name, record)| (*context, row(name.as_ref(), record, terminal))).collect(),
    );
    if records.len() == wanted.limit {
        output::note(&format!("there may be more than these {}: --limit NUMBER", wanted.limit));
    }
    ended
}

/// Keeps the first of these: the newest, or the oldest in one state.
fn first<T>(records: &mut Vec<T>, wanted: &Wanted, record: impl Fn(&T) -> &Record) {
    match wanted.state {
        None => records.sort_by_key(|it| Reverse(record(it).event.created_at)),
        Some(_) => records.sort_by_key(|it| record(it).event.created_at),
    }
    records.truncate(wanted.limit);
}

/// Each record with its subscription, unless it is of the log.
type Found = (Vec<(Option<SubscriptionName>, Record)>, Vec<String>, Result<(), Failure>);

/// The records of one store, remarks, and why something is missing.
async fn records(context: &Context, wanted: &Wanted, json: bool) -> Result<Found, Failure> {
    let store = context.store().await?;
    let infos = context.registered(store.as_ref()).await?;
    let mut records: Vec<(Option<SubscriptionName>, Record)> = Vec::new();
    // An event that no subscription wants is of its log, though each subscription lists it.
    let is_of_log = wanted.state == Some(State::Unrouted);
    let mut listed = BTreeSet::new();
    for info in &infos {
        let mut query = ListQuery {
            subscription: info.name.clone(),
            state: wanted.state,
            which: wanted.which.clone(),
            code: wanted.code.clone(),
            headers: wanted.headers.clone(),
            after: None,
            limit: 0,
            payloads: json,
        };
        // The first of all subscriptions are among the first of each.
        let mut read = 0;
        while read < wanted.limit {
            query.limit = (wanted.limit - read).min(PAGE);
            let page = store.list(&query).await?;
            // A page may be short because its payloads are large; only an empty page is the end.
            let Some(last) = page.last() else { break };
            query.after = Some(last.seq);
            read += page.len();
            let page = page.into_iter().filter(|record| !is_of_log || listed.insert((info.log.clone(), record.seq)));
            records.extend(page.map(|record| ((!is_of_log).then(|| info.name.clone()), record)));
        }
        first(&mut records, wanted, |(_, record)| record);
    }
    let mut notes: Vec<String> = context.never_run(&infos).map(|name| context.why_unread(name, &infos)).collect();
    let mut ended = Ok(());
    if wanted.state.is_none_or(|state| state == State::Pending) {
        let unread = context.unread(store.as_ref()).await.unwrap_or_else(|error| {
            let why = Failure::from(error);
            ended = Err(Failure::failed(format!("the logs that nobody reads could not be counted: {}", why.text())));
            Vec::new()
        });
        for (log, count) in unread {
            notes.push(format!(
                "nobody reads the {log}, so its {} event(s) are not shown: {}",
                estimated(count.events, count.is_estimate),
                context.reader_wanted(&log)
            ));
        }
    }
    Ok((records, notes, ended))
}

pub(crate) const HEAD: [&str; 10] =
    ["id", "subscription", "state", "topic", "key", "created", "attempts", "due", "code", "error"];

pub(crate) fn row(subscription: Option<&SubscriptionName>, record: &Record, terminal: bool) -> Vec<String> {
    let error = record.error.as_deref().unwrap_or("-");
    vec![
        record.event.id.to_string(),
        subscription.map_or_else(|| "-".to_owned(), SubscriptionName::to_string),
        record.state.to_string(),
        record.event.topic.to_string(),
        record.event.key.as_ref().map_or_else(|| "-".to_owned(), |key| key.to_string()),
        format!("{:.0}", record.event.created_at),
        record.attempts.to_string(),
        record.due_at.map_or_else(|| "-".to_owned(), |at| format!("{at:.0}")),
        record.code.clone().unwrap_or_else(|| "-".to_owned()),
        if terminal { cut(error, ERROR_CHARS) } else { error.to_owned() },
    ]
}
