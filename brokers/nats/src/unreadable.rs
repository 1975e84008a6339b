//! Messages that the client cannot read: a header without a colon, a value that is not UTF-8.
//!
//! When one arrives, the client drops the connection, with everything that was requested together
//! with it, and again at each redelivery. JetStream's API returns such a message as JSON, so it is
//! read by its number instead.

use std::str::FromStr as _;

use async_nats::header::{HeaderName, HeaderValue};
use async_nats::{Client, HeaderMap, Message, StatusCode};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use jiff::Timestamp;
use postbox_core::Down;
use serde_json::{Value, json};
use tracing::warn;

use crate::classify;
use crate::config::NatsSourceTable;
use crate::jetstream::{NO_MESSAGE, call, filters};

/// The most messages of a look, for each filter: about twice what is in flight by default. If the
/// consumer has delivered more, behind one that is not acknowledged, the next look goes on there.
const LOOK_MAX: usize = 1_000;

/// Looks, from the number `from` on, for messages that the consumer has delivered and that the
/// client cannot read. Returns them, with the readable part of their headers, and the number from
/// which the next look goes on; 0 if this one has seen all.
pub(crate) async fn unreadable(
    client: &Client,
    table: &NatsSourceTable,
    from: u64,
) -> Result<(Vec<Message>, u64), Down> {
    let NatsSourceTable { stream, consumer: name, .. } = table;
    let not_done = |refusal| classify::not_done(&format!("the stream {stream} cannot be read by numbers"), &refusal);
    let info = call(client, &format!("CONSUMER.INFO.{stream}.{name}"), &Value::Null).await?.map_err(not_done)?;
    let number = |key: &str| info[key]["stream_seq"].as_u64().unwrap_or_default();
    let (settled, last) = (number("ack_floor"), number("delivered"));
    let (mut found, mut rest) = (Vec::new(), None::<u64>);
    if info["num_ack_pending"] == 0 {
        return Ok((found, 0));
    }
    for filter in filters(&info["config"]) {
        let (mut next, mut left) = (from.max(settled + 1), LOOK_MAX);
        while left > 0 {
            left -= 1;
            let question = json!({ "seq": next, "next_by_subj": filter });
            let message = match call(client, &format!("STREAM.MSG.GET.{stream}"), &question).await? {
                Ok(mut answer) => answer["message"].take(),
                Err(refusal) if refusal.err_code == NO_MESSAGE => break,
                Err(refusal) => return Err(not_done(refusal)),
            };
            let Some(number) = message["seq"].as_u64().filter(|number| *number <= last) else { break };
            next = number + 1;
            if let Some(message) = as_far_as_readable(table, number, &message) {
                let cure = format!("fix its producer, or delete it: nats stream rmm {stream} {number}");
                warn!(code = "nats_message_unreadable", stream, number, cure, "message unreadable");
                found.push(message);
            }
            if left == 0 && number < last {
                rest = Some(rest.map_or(next, |rest| rest.min(next)));
            }
        }
    }
    Ok((found, rest.unwrap_or_default()))
}

/// Returns the readable part of a message; `None` if the client can read it.
fn as_far_as_readable(table: &NatsSourceTable, number: u64, message: &Value) -> Option<Message> {
    let bytes = |key: &str| BASE64_STANDARD.decode(message[key].as_str().unwrap_or_default()).unwrap_or_default();
    let subject = message["subject"].as_str().unwrap_or_default();
    let (headers, whole) = headers(&bytes("hdrs"));
    // The JSON has this character in place of bytes that are not UTF-8.
    if whole && !subject.contains(char::REPLACEMENT_CHARACTER) {
        return None;
    }
    let payload = bytes("data");
    let time: Timestamp = message["time"].as_str().unwrap_or_default().parse().unwrap_or_default();
    let time = time.as_nanosecond();
    // For an ack, the server only uses the message's number.
    let ack = format!("$JS.ACK.{}.{}.1.{number}.{number}.{time}.0", table.stream, table.consumer);
    Some(Message {
        subject: subject.into(),
        reply: Some(ack.into()),
        length: payload.len(),
        payload: payload.into(),
        headers: Some(headers),
        status: None,
        description: None,
    })
}

/// Returns the headers that can be read, and whether the client can read the whole block.
fn headers(block: &[u8]) -> (HeaderMap, bool) {
    let mut lines = block.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let mut headers = HeaderMap::new();
    if block.is_empty() {
        return (headers, true);
    }
    let mut whole = lines.next().and_then(|line| str::from_utf8(line).ok()).is_some_and(is_first_line);
    // A line that begins with white space continues the one before, and is ignored.
    for line in lines.filter(|line| line.first().is_some_and(|byte| !byte.is_ascii_whitespace())) {
        let text = str::from_utf8(line).ok();
        let header = text.and_then(|text| text.split_once(':')).and_then(|(name, value)| {
            Some((name.parse::<HeaderName>().ok()?, value.trim().parse::<HeaderValue>().ok()?))
        });
        match header {
            Some((name, value)) => headers.append(name, value),
            None => whole = false,
        }
    }
    (headers, whole && str::from_utf8(block).is_ok())
}

fn is_first_line(line: &str) -> bool {
    let status = line.strip_prefix("NATS/1.0").map(str::trim);
    let number = status.map(|status| status.split_once(' ').map_or(status, |(number, _)| number));
    number.is_some_and(|number| number.is_empty() || StatusCode::from_str(number).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_read_of_a_header_is_kept() {
        for (block, names, whole) in [
            (&b"NATS/1.0\r\na: b\r\nc: d\r\n\r\n"[..], "a c", true),
            (b"", "", true),
            (b"NATS/1.0\r\n\r\n", "", true),
            (b"NATS/1.0 409 Consumer Deleted\r\na: b\r\n\r\n", "a", true),
            (b"NATS/1.0 abc\r\na: b\r\n\r\n", "a", false),
            (b"NATS/9.9\r\na: b\r\n\r\n", "a", false),
            (b"NATS/1.0\r\nx: \xff\r\na: b\r\n\r\n", "a", false),
            (b"NATS/1.0\r\na: b\r\nno colon\r\n\r\n", "a", false),
            (b"NATS/1.0\r\na b: c\r\nd: e\r\n\r\n", "d", false),
            (b"NATS/1.0\r\na: b\r\nd: e", "a d", true),
            (b"\x00\x01\xff", "", false),
        ] {
            let (headers, is_whole) = headers(block);
            let mut found: Vec<&str> = headers.iter().map(|(name, _)| name.as_ref()).collect();
            found.sort_unstable();
            assert_eq!((found.join(" ").as_str(), is_whole), (names, whole), "{}", block.escape_ascii());
        }
    }
}
