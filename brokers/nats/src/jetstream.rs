//! The few calls of JetStream's API that are needed, to look things up and to create them.

use std::time::Duration;

use async_nats::{Client, Request, RequestErrorKind};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use jiff::Timestamp;
use postbox_core::{Down, ErrorKind};
use serde_json::{Value, json};

use crate::classify::{self, Answer, Refusal};
use crate::config::NatsSourceTable;

/// The longest wait for an answer of the API: a new stream with three replicas takes a second on a
/// busy machine.
const API_TIMEOUT: Duration = Duration::from_secs(5);
/// Error numbers of missing things.
const NO_CONSUMER: u32 = 10_014;
const NO_STREAM: u32 = 10_059;
/// A consumer of a work queue cannot begin at a time.
const FROM_FIRST_ONLY: u32 = 10_101;
pub(crate) const NO_MESSAGE: u32 = 10_037;

/// The code if nobody answers the API: JetStream is off, or out of reach, e.g. in another domain.
pub(crate) const NO_JETSTREAM: &str = "nats_no_jetstream";

/// The code if the API did not answer in time.
pub(crate) const API_TOO_SLOW: &str = "nats_api_timeout";

/// Calls the API. `Ok(Err(…))` means that the server refused.
pub(crate) async fn call(client: &Client, name: &str, body: &Value) -> Result<Result<Value, Refusal>, Down> {
    // The server refuses a body in a request that takes none.
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let request = Request::new().payload(body.into()).timeout(Some(API_TIMEOUT));
    let answered = client.send_request(format!("$JS.API.{name}"), request).await;
    let message = answered.map_err(|error| match error.kind() {
        RequestErrorKind::NoResponders => {
            let text = "JetStream does not answer: it is off (nats-server -js), off for this account, or has no leader";
            Down::new(ErrorKind::Unavailable, NO_JETSTREAM, text)
        }
        RequestErrorKind::TimedOut => {
            let text = format!("JetStream did not answer {name} in {API_TIMEOUT:?}; may the user call $JS.API.{name}?");
            Down::new(ErrorKind::Unavailable, API_TOO_SLOW, text)
        }
        _ => classify::lost(),
    })?;
    if let Ok(Answer { error: Some(refusal), .. }) = serde_json::from_slice(&message.payload) {
        return Ok(Err(refusal));
    }
    serde_json::from_slice(&message.payload).map(Ok).map_err(|_| {
        Down::new(ErrorKind::Unavailable, "nats_answer_unknown", format!("the answer to {name} is not JSON"))
    })
}

/// The settings of a stream that is created if it is missing.
#[derive(Debug, Clone)]
pub(crate) struct NewStream {
    pub(crate) subjects: Vec<String>,
    pub(crate) replicas: u8,
    pub(crate) duplicate_window: Duration,
}

/// The settings of a stream that matter to a sink.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Settings {
    /// How long it remembers message ids.
    pub(crate) duplicate_window: Duration,
    /// Whether it deletes a message once its consumers acknowledged it.
    pub(crate) deletes_acked: bool,
    /// Whether it now throws away what is published, because no consumer wants it.
    pub(crate) discards: bool,
    /// Whether it never acknowledges a publish.
    pub(crate) no_ack: bool,
}

/// Returns a stream's settings; `None` if there is no such stream.
pub(crate) async fn settings(client: &Client, stream: &str) -> Result<Option<Settings>, Down> {
    let settings = |info: Value| Settings {
        duplicate_window: Duration::from_nanos(info["config"]["duplicate_window"].as_u64().unwrap_or_default()),
        deletes_acked: matches!(info["config"]["retention"].as_str(), Some("workqueue" | "interest")),
        discards: info["config"]["retention"] == "interest" && info["state"]["consumer_count"] == 0,
        no_ack: info["config"]["no_ack"] == true,
    };
    Ok(stream_info(client, stream).await?.map(settings))
}

/// Returns the number of the last message that a stream has stored; `None` if there is no such
/// stream.
pub(crate) async fn last_number(client: &Client, stream: &str) -> Result<Option<u64>, Down> {
    Ok(stream_info(client, stream).await?.map(|info| info["state"]["last_seq"].as_u64().unwrap_or_default()))
}

async fn stream_info(client: &Client, stream: &str) -> Result<Option<Value>, Down> {
    match call(client, &format!("STREAM.INFO.{stream}"), &Value::Null).await? {
        Ok(info) => Ok(Some(info)),
        Err(refusal) if refusal.err_code == NO_STREAM => Ok(None),
        Err(refusal) => Err(classify::not_done(&format!("the stream {stream} cannot be inspected"), &refusal)),
    }
}

/// Returns subject and payload of a message; `None` if the stream has it no more.
pub(crate) async fn message_at(client: &Client, stream: &str, number: u64) -> Result<Option<(String, Vec<u8>)>, Down> {
    match call(client, &format!("STREAM.MSG.GET.{stream}"), &json!({ "seq": number })).await? {
        Ok(answer) => {
            let text = |key: &str| answer["message"][key].as_str();
            let payload = BASE64_STANDARD.decode(text("data").unwrap_or_default()).unwrap_or_default();
            Ok(text("subject").map(|subject| (subject.to_owned(), payload)))
        }
        Err(refusal) if refusal.err_code == NO_MESSAGE => Ok(None),
        Err(refusal) if refusal.err_code == NO_STREAM => {
            Err(Down::new(ErrorKind::Mismatch, classify::NO_STREAM, format!("there is no stream {stream} here")))
        }
        Err(refusal) => Err(classify::not_done(&format!("a message of {stream} cannot be read"), &refusal)),
    }
}

/// Returns the streams that take any subject of a pattern.
pub(crate) async fn streams_of(client: &Client, pattern: &str) -> Result<Vec<String>, Down> {
    let names = match call(client, "STREAM.NAMES", &json!({ "subject": pattern })).await? {
        Ok(names) => names["streams"].as_array().cloned().unwrap_or_default(),
        Err(refusal) => return Err(classify::not_done("the streams cannot be listed", &refusal)),
    };
    Ok(names.iter().filter_map(Value::as_str).map(str::to_owned).collect())
}

pub(crate) async fn create_stream(client: &Client, stream: &str, new: &NewStream) -> Result<(), Down> {
    let config = json!({
        "name": stream,
        "subjects": new.subjects,
        "retention": "limits",
        "storage": "file",
        "num_replicas": new.replicas,
        "duplicate_window": nanos(new.duplicate_window),
    });
    let created = call(client, &format!("STREAM.CREATE.{stream}"), &config).await?;
    created.map(drop).map_err(|refusal| classify::not_done(&format!("the stream {stream} cannot be created"), &refusal))
}

/// What is known of a consumer that exists.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Consumer {
    /// How long it waits for an acknowledgement.
    pub(crate) ack_wait: Duration,
    /// The most messages of a request.
    pub(crate) batch_max: usize,
    /// The longest time that a request stays open.
    pub(crate) expires_max: Duration,
    /// Whether this call created it.
    pub(crate) is_made: bool,
    /// Whether nothing is pending and nothing awaits an acknowledgement.
    pub(crate) is_done: bool,
}

/// Makes sure that the consumer exists. If it is missing, it begins at the time `since`, or else
/// with the first message.
pub(crate) async fn ensure_consumer(
    client: &Client,
    table: &NatsSourceTable,
    since: Option<Timestamp>,
) -> Result<Consumer, Down> {
    let NatsSourceTable { stream, consumer: name, .. } = table;
    let (info, is_made) = match consumer_info(client, table).await? {
        Ok(info) => (info, false),
        Err(refusal) if refusal.err_code == NO_CONSUMER && table.create => {
            create_consumer(client, table, since).await?
        }
        Err(refusal) if refusal.err_code == NO_CONSUMER => {
            let text = format!(
                "the stream {stream} has no consumer {name}; set create = true, or create it with: nats consumer add {stream} {name} --pull --ack explicit --deliver all"
            );
            return Err(Down::new(ErrorKind::Mismatch, classify::NO_CONSUMER, text));
        }
        Err(refusal) if refusal.err_code == NO_STREAM => {
            let text = format!(
                "there is no stream {stream}; create it with: nats stream add {stream} --subjects SUBJECTS --dupe-window 4h --defaults"
            );
            return Err(Down::new(ErrorKind::Mismatch, classify::NO_STREAM, text));
        }
        Err(refusal) => return Err(classify::not_done(&format!("the consumer {name} cannot be inspected"), &refusal)),
    };
    let config = &info["config"];
    if config["deliver_subject"].is_string() || config["ack_policy"] != "explicit" {
        let text = format!("the consumer {name} of {stream} is not a pull consumer with explicit acks; name another");
        return Err(Down::new(ErrorKind::Mismatch, "nats_consumer_other", text));
    }
    // The consumer would drop a message after this many deliveries, without reporting it.
    if let Some(times) = config["max_deliver"].as_i64().filter(|times| *times > 0) {
        let text = format!(
            "the consumer {name} of {stream} gives a message up after {times} deliveries (max_deliver), so a restart \
             or a store that is away could lose it; set it to -1: nats consumer edit {stream} {name} --max-deliver=-1"
        );
        return Err(Down::new(ErrorKind::Mismatch, "nats_consumer_gives_up", text));
    }
    if let Some(fault) = fault(config, table) {
        let text = format!("the consumer {name} of {stream} {fault}, or name another");
        return Err(Down::new(ErrorKind::Mismatch, "nats_consumer_other", text));
    }
    let limit = |key: &str| config[key].as_u64().filter(|limit| *limit > 0).unwrap_or(u64::MAX);
    Ok(Consumer {
        ack_wait: Duration::from_nanos(config["ack_wait"].as_u64().unwrap_or_default()),
        batch_max: usize::try_from(limit("max_batch")).unwrap_or(usize::MAX),
        expires_max: Duration::from_nanos(limit("max_expires")),
        is_made,
        is_done: !is_made && info["num_pending"] == 0 && info["num_ack_pending"] == 0,
    })
}

async fn consumer_info(client: &Client, table: &NatsSourceTable) -> Result<Result<Value, Refusal>, Down> {
    call(client, &format!("CONSUMER.INFO.{}.{}", table.stream, table.consumer), &Value::Null).await
}

/// Returns why the messages of a consumer would not be those that are configured, and the cure.
fn fault(config: &Value, table: &NatsSourceTable) -> Option<String> {
    let NatsSourceTable { stream, consumer: name, .. } = table;
    if config["headers_only"] == true {
        return Some(format!(
            "gives every message without its payload (headers_only); edit it: \
             nats consumer edit {stream} {name} --no-headers-only"
        ));
    }
    if config["priority_groups"].as_array().is_some_and(|groups| !groups.is_empty()) {
        return Some("has priority groups, which a source cannot ask in; create it without them".to_owned());
    }
    // Otherwise a message that is given back comes again after later ones, and every replica gets
    // one.
    if table.in_flight == 1 && config["max_ack_pending"] != 1 {
        return Some(format!(
            "gives several messages at once (max_ack_pending), so in_flight = 1 would not keep their order; edit it: \
             nats consumer edit {stream} {name} --max-pending=1"
        ));
    }
    // A consumer with several filters can be used by not configuring one.
    let wanted = table.filter.as_deref()?;
    let its = filters(config);
    (its != [wanted]).then(|| {
        let its = its.join(", ");
        format!(
            "takes {its}, but the source's filter is {wanted}; correct the filter, or edit the consumer: \
             nats consumer edit {stream} {name} --filter '{wanted}'"
        )
    })
}

/// Returns the subjects that a consumer delivers.
pub(crate) fn filters(config: &Value) -> Vec<String> {
    let several = config["filter_subjects"].as_array().cloned().unwrap_or_default();
    let all = several.iter().chain([&config["filter_subject"]]).filter_map(Value::as_str);
    let all: Vec<String> = all.filter(|filter| !filter.is_empty()).map(str::to_owned).collect();
    if all.is_empty() { vec![">".to_owned()] } else { all }
}

/// Returns the consumer, and whether it was created here.
async fn create_consumer(
    client: &Client,
    table: &NatsSourceTable,
    since: Option<Timestamp>,
) -> Result<(Value, bool), Down> {
    let NatsSourceTable { stream, consumer: name, .. } = table;
    let mut config = json!({
        "durable_name": name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": nanos(table.ack_wait),
        "max_ack_pending": table.in_flight,
        "max_deliver": -1,
        "replay_policy": "instant",
    });
    if let Some(filter) = &table.filter {
        config["filter_subject"] = filter.as_str().into();
    }
    if let Some(since) = since {
        config["deliver_policy"] = "by_start_time".into();
        config["opt_start_time"] = since.to_string().into();
    }
    let api = format!("CONSUMER.DURABLE.CREATE.{stream}.{name}");
    let mut body = json!({ "stream_name": stream, "config": config });
    let mut created = call(client, &api, &body).await?;
    // A work queue has only what is not acknowledged.
    if since.is_some() && created.as_ref().is_err_and(|refusal| refusal.err_code == FROM_FIRST_ONLY) {
        body["config"]["deliver_policy"] = "all".into();
        body["config"]["opt_start_time"] = Value::Null;
        created = call(client, &api, &body).await?;
    }
    let refusal = match created {
        Ok(created) => return Ok((created, true)),
        Err(refusal) => refusal,
    };
    // Another replica may have been faster. The server does not move a consumer that exists.
    let info = consumer_info(client, table).await?;
    info.map(|info| (info, false))
        .map_err(|_| classify::not_done(&format!("the consumer {name} of {stream} cannot be created"), &refusal))
}

pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
