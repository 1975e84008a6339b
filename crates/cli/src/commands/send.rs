//! `postbox send TOPIC`: appends one event in its own transaction.

use std::io::Read;

use jiff::Timestamp;
use postbox_core::limits::PAYLOAD_BYTES_MAX;
use postbox_core::{Error, EventId, LogName, NewEvent};

use crate::args::SendArgs;
use crate::context::Context;
use crate::failure::{Failure, is_refused};
use crate::output;

pub(super) async fn run(context: &Context, send: SendArgs, json: bool) -> Result<(), Failure> {
    if context.only.is_some() {
        return Err(Failure::usage("an event is appended to a log, not to a subscription; leave --subscription out"));
    }
    let mut event = event(send)?;
    let id = *event.id.get_or_insert_with(EventId::now_v7);
    let log = context.log.clone().unwrap_or_else(LogName::outbox);
    let store = context.store_to_append().await?;
    let appended = store.append(&log, &[event]).await.map_err(|error| match is_refused(&error) {
        true => Failure::from(error),
        false => Failure::failed(format!(
            "{}; whether the event was appended is not known: to append it once, repeat with --id {id}",
            Failure::from(error).text()
        )),
    })?;
    if !appended.is_new() {
        output::note(&format!("the {log} has this event {id} already; it was not appended again"));
    }
    let said = serde_json::json!({ "id": id, "log": log, "appended": appended.is_new() });
    output::result(json, &said, &id.to_string());
    output::nevertheless(&format!("event {id} is in the {log}"));
    Ok(())
}

fn refused(error: Error) -> Failure {
    Failure::usage(format!("{} ({})", error.message(), error.code()))
}

fn event(send: SendArgs) -> Result<NewEvent, Failure> {
    let SendArgs { topic, payload, key, tenant, headers, content_type, expires_in, id, idempotency_key } = send;
    let payload = match payload.as_str() {
        "-" => read("standard input", std::io::stdin().lock())?,
        text => match text.strip_prefix('@') {
            Some(path) => {
                let file = std::fs::File::open(path);
                read(path, file.map_err(|error| Failure::usage(format!("cannot read {path}: {error}")))?)?
            }
            None => text.as_bytes().to_vec(),
        },
    };
    let mut event = NewEvent::new(topic, payload, content_type);
    let of_key = idempotency_key.map(EventId::from_key).transpose().map_err(refused)?;
    event.id = id.or(of_key);
    event.key = key;
    event.tenant = tenant;
    event.expires_at = expires_in.map(|time| Timestamp::now().checked_add(time)).transpose().map_err(too_late)?;
    for (name, value) in headers {
        if event.headers.contains_key(&name) {
            let text =
                format!("--header {name} is there twice, and an event has one value for each name; leave one out");
            return Err(Failure::usage(text));
        }
        event.headers.insert(name, value);
    }
    event.validate().map_err(refused)?;
    // Checked as the receiver will see it: JSON if the content type says so.
    let preview = event.clone().into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
    if preview.is_json()
        && let Err(error) = serde_json::from_slice::<serde::de::IgnoredAny>(&event.payload)
    {
        let text =
            format!("the payload is not JSON: {error}; correct it, or give its type, e.g. --content-type text/plain");
        return Err(Failure::usage(text));
    }
    Ok(event)
}

fn too_late(_: jiff::Error) -> Failure {
    Failure::usage("--expires-in reaches beyond the year 9999; leave it out if the event never expires")
}

/// Reads at most one byte more than the limit; the size is checked with everything else.
fn read(what: &str, from: impl Read) -> Result<Vec<u8>, Failure> {
    let mut payload = Vec::new();
    from.take(PAYLOAD_BYTES_MAX as u64 + 1)
        .read_to_end(&mut payload)
        .map_err(|error| Failure::usage(format!("cannot read {what}: {error}")))?;
    Ok(payload)
}
