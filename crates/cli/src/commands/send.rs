//! `postbox send TOPIC`: appends one event, in a transaction of its own.

use std::io::Read;

use jiff::Timestamp;
use postbox_core::limits::PAYLOAD_BYTES_MAX;
use postbox_core::{EventId, LogName, NewEvent};

use crate::args::SendArgs;
use crate::context::Context;
use crate::failure::Failure;
use crate::output;

pub(super) async fn run(context: &Context, send: SendArgs, json: bool) -> Result<(), Failure> {
    if context.only.is_some() {
        return Err(Failure::usage("an event goes into a log, for whoever reads it; leave --subscription out"));
    }
    let event = event(send)?;
    let (id, log) = (event.id, context.log.clone().unwrap_or_else(LogName::outbox));
    let store = context.store().await?;
    let said = |id: &EventId, appended: bool| {
        output::done(json, &serde_json::json!({ "id": id, "log": log, "appended": appended }), &id.to_string())
    };
    match (store.append(&log, &[event]).await, id) {
        (Ok(ids), _) => ids.iter().try_for_each(|id| said(id, true)),
        // Another tenant's event is not shown to this one, and nothing says that it is the same.
        (Err(error), Some(id)) if error.code() == "event_id_taken" => {
            if store.ids(&log, &id.into(), 1).await.is_ok_and(|seen| seen.is_empty()) {
                return Err(error.into());
            }
            output::note(&format!("the {log} has an event {id} already; it stays as it is"));
            said(&id, false)
        }
        (Err(error), _) => Err(error.into()),
    }
}

fn event(send: SendArgs) -> Result<NewEvent, Failure> {
    let SendArgs { topic, payload, key, tenant, headers, content_type, expires_in, id } = send;
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
    event.id = id;
    event.key = key;
    event.tenant = tenant;
    event.expires_at = expires_in.map(|time| Timestamp::now().checked_add(time)).transpose().map_err(too_late)?;
    event.headers.extend(headers);
    event.validate().map_err(|error| Failure::usage(format!("{} ({})", error.message(), error.code())))?;
    // As whoever gets it will judge: by what the content type says.
    let preview = event.clone().into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
    if preview.is_json()
        && let Err(error) = serde_json::from_slice::<serde::de::IgnoredAny>(&event.payload)
    {
        let text =
            format!("the payload is no JSON: {error}; mend it, or say what it is, e.g. --content-type text/plain");
        return Err(Failure::usage(text));
    }
    Ok(event)
}

fn too_late(_: jiff::Error) -> Failure {
    Failure::usage("--expires-in reaches beyond the year 9999; leave it out where there is no end")
}

/// At most one byte more than may be sent: its size is judged with everything else.
fn read(what: &str, from: impl Read) -> Result<Vec<u8>, Failure> {
    let mut payload = Vec::new();
    from.take(PAYLOAD_BYTES_MAX as u64 + 1)
        .read_to_end(&mut payload)
        .map_err(|error| Failure::usage(format!("cannot read {what}: {error}")))?;
    Ok(payload)
}
