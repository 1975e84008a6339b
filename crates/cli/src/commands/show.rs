//! `postbox show ID`.

use postbox_core::{Attempt, Event, EventId, Record, SubscriptionInfo};
use postbox_server::status::ShowJson;
use postbox_server::text::{safe_lines, span};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

pub(super) async fn run(context: &Context, id: EventId, json: bool) -> Result<(), Failure> {
    let store = context.store().await?;
    let mut found: Vec<(SubscriptionInfo, Record)> = Vec::new();
    let infos = context.some_registered(store.as_ref()).await?;
    let log = infos.first().map(|info| info.log.clone());
    for info in infos {
        if let Some(record) = store.get(&info.name, id).await? {
            found.push((info, record));
        }
    }
    let Some((_, first)) = found.first() else {
        let unread = context.unread(store.as_ref()).await?;
        return Err(match unread.first() {
            None => context.no_event(log.as_ref(), &id.to_string()),
            Some((log, _)) => Failure::failed(format!(
                "no subscription has an event {id}; it was never committed, was pruned, or is in the {log}, which nobody reads: {}",
                context.reader_wanted(log)
            )),
        });
    };
    if json {
        output::json(&ShowJson::new(&found));
        return Ok(());
    }
    output::fields(&fields(&found));
    output::print(&format!("\n{}\n", payload(&first.event)));
    Ok(())
}

/// The event's own fields, and its state in each subscription.
pub(crate) fn fields(found: &[(SubscriptionInfo, Record)]) -> Vec<(&'static str, String)> {
    let mut fields = found.first().map_or_else(Vec::new, |(_, first)| describe(first));
    for (info, record) in found {
        fields.push(("delivery", stand(info, record)));
        fields.extend(record.last_attempts.iter().map(|attempt| ("  attempt", tried(attempt))));
    }
    fields
}

fn describe(record: &Record) -> Vec<(&'static str, String)> {
    let event = &record.event;
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
    let mut fields = vec![
        ("id", event.id.to_string()),
        ("seq", record.seq.to_string()),
        ("topic", event.topic.to_string()),
        ("key", event.key.as_ref().map_or_else(|| "-".into(), |key| key.to_string())),
        ("aggregate", text(&event.aggregate)),
        ("version", event.version.map_or_else(|| "-".into(), |version| version.to_string())),
        ("kind", event.kind().to_owned()),
        ("source", text(&event.source)),
        ("tenant", event.tenant.as_ref().map_or_else(|| "-".into(), |tenant| tenant.to_string())),
        ("occurred at", event.occurred_at.to_string()),
        ("created at", event.created_at.to_string()),
    ];
    fields.extend(event.deliver_at.map(|at| ("deliver at", at.to_string())));
    fields.extend(event.expires_at.map(|at| ("expires at", at.to_string())));
    fields.extend(event.headers.iter().map(|(name, value)| ("header", format!("{name}: {value}"))));
    fields.push(("content type", event.content_type().to_owned()));
    fields.push(("payload", format!("{} bytes, below", event.payload.len())));
    fields
}

fn stand(info: &SubscriptionInfo, record: &Record) -> String {
    let mut text = format!("{}: {}", info.name, record.state);
    if record.attempts > 0 {
        text += &format!(", {} attempt(s)", record.attempts);
    }
    if record.replays > 0 {
        text += &format!(", sent again as -r{}", record.replays);
    }
    if let Some(due_at) = record.due_at {
        text += &format!(", due {due_at:.0}");
    }
    if let Some(code) = &record.code {
        text += &format!(", {code}");
    }
    if let Some(error) = &record.error {
        text += &format!(": {error}");
    }
    text
}

fn tried(attempt: &Attempt) -> String {
    let Attempt { at, code, took, answer, next_at } = attempt;
    let next = next_at.map_or_else(String::new, |at| format!("; next {at:.0}"));
    format!("{at:.0}, {code} after {}: {answer}{next}", span(*took))
}

/// Text is printed as it is, made safe; other bytes in hexadecimal, sixteen per line.
fn payload(event: &Event) -> String {
    if let Ok(text) = std::str::from_utf8(&event.payload) {
        return safe_lines(text);
    }
    let lines = event.payload.chunks(16).enumerate().map(|(line, bytes)| {
        let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let shown: String =
            bytes.iter().map(|byte| if (0x20..0x7f).contains(byte) { char::from(*byte) } else { '.' }).collect();
        format!("{:08x}  {:<47}  {shown}", line * 16, hex.join(" "))
    });
    lines.collect::<Vec<_>>().join("\n")
}
