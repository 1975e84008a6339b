//! `postbox tail`: events as they are appended, until Ctrl-C.

use std::time::Duration;

use postbox_core::{BatchLimit, Criteria, Event, Key, LogName, Seq};
use postbox_server::status::TailedJson;
use postbox_server::text::{cut, safe_line};
use tokio::select;

use crate::context::Context;
use crate::failure::Failure;
use crate::layout::{SHORT_ID_CHARS, columns, cut_to, width};
use crate::output;
use crate::signals::stopped;

/// Most of a log held in memory at once. A larger payload comes alone.
const PAGE: BatchLimit = BatchLimit { events: 200, payload_bytes: 4 * 1024 * 1024 };
/// Interval between two reads without new events. A person sees no difference, and a read costs the
/// database a few index probes.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Most characters of a payload shown at a terminal; `show` prints all of it.
const PAYLOAD_CHARS: usize = 60;

const HEAD: [&str; 6] = ["appended", "seq", "id", "topic", "key", "payload"];

pub(super) async fn run(context: &Context, which: &Criteria, json: bool) -> Result<(), Failure> {
    if context.only.is_some() {
        return Err(Failure::usage("tail shows a log, not a subscription; leave --subscription out"));
    }
    let mut stop = std::pin::pin!(stopped());
    let log = context.log.clone().unwrap_or_else(LogName::outbox);
    let store = context.store().await?;
    let mut place = match store.tail(&log, which, None, PAGE).await {
        Ok(tailed) => tailed.place,
        Err(error) => {
            // Without a schema there is no log either, and the schema is to be named.
            store.validate().await?;
            return Err(error.into());
        }
    };
    output::note(&format!("events appended to the {log} from now on; stop with Ctrl-C"));
    let terminal = output::is_terminal();
    if !json && !terminal {
        output::line_of(&HEAD);
    }
    loop {
        let tailed = select! {
            biased;
            () = &mut stop => return Ok(()),
            tailed = store.tail(&log, which, Some(&place), PAGE) => tailed?,
        };
        for (seq, event) in &tailed.events {
            if json {
                output::json_line(&TailedJson::new(*seq, event));
            } else if terminal {
                output::print(&for_people(event, width()));
            } else {
                output::line_of(&row(*seq, event));
            }
        }
        if output::is_broken() {
            return Ok(());
        }
        place = tailed.place;
        if !tailed.more {
            select! {
                biased;
                () = &mut stop => return Ok(()),
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }
}

fn key(event: &Event) -> &str {
    event.key.as_ref().map_or("-", Key::as_str)
}

fn row(seq: Seq, event: &Event) -> [String; 6] {
    let payload = String::from_utf8_lossy(&event.payload).into_owned();
    let [id, topic, key] = [event.id.to_string(), event.topic.to_string(), key(event).to_owned()];
    [event.created_at.to_string(), seq.to_string(), id, topic, key, payload]
}

/// One line, however long the payload, so that the id is easy to find and copy. If it does not fit,
/// the id is shortened as in tables, and the rest is cut.
pub(crate) fn for_people(event: &Event, width: Option<u16>) -> String {
    let id = event.id.to_string();
    let payload = cut(&String::from_utf8_lossy(&event.payload), PAYLOAD_CHARS);
    let line =
        |id: &str| safe_line(&format!("{:.3}  {id}  {}  {}  {payload}", event.created_at, event.topic, key(event)));
    let whole = line(&id);
    let shown = match width {
        Some(width) if columns(&whole) > width => cut_to(&line(&id[..SHORT_ID_CHARS[0]]), width),
        _ => whole,
    };
    shown + "\n"
}
