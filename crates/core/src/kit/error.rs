//! Errors that every store reports in the same words.

use crate::error::{Error, ErrorKind, Result};
use crate::limits::{LANES_APART_MAX, LANES_MAX, MESSAGE_ID_BYTES_MAX};
use crate::names::{LogName, SubscriptionName};
use crate::subscription::Subscription;

/// The caller's cursor is not the one in the store. Either the store went back to an earlier state,
/// or a call whose answer was lost moved the cursor on. The lane must be acquired again.
pub fn window_undone(operation: &'static str) -> Error {
    let message = "the lane's cursor is not the one that was read: the store was restored to an earlier state, or an \
                   earlier call took effect; the events are read again";
    Error::new(ErrorKind::Stale, operation, "window_undone", message)
}

/// An earlier call whose answer was lost settled these events, or a person changed a row meanwhile.
/// The handlers' work in this transaction must be rolled back with it.
pub fn settled_already() -> Error {
    let message = "the events were settled or changed meanwhile; what this call did is rolled back";
    Error::new(ErrorKind::Stale, "apply", "settled_already", message)
}

/// Handlers got events that another handle of the store read. Only the one that read them knows the
/// window that a settlement belongs to, so every transaction would be rolled back.
pub fn handlers_of_another_store(subscription: &SubscriptionName) -> Error {
    let message = format!(
        "the handlers' store did not read these events of {subscription}; build the router on a clone of the store \
         that the relay reads"
    );
    Error::new(ErrorKind::Mismatch, "apply", "handlers_of_another_store", message)
}

/// Lanes of a subscription were deleted.
pub fn lanes_missing(subscription: &SubscriptionName) -> Error {
    let message = format!(
        "lanes of subscription {subscription} were deleted, so part of its log is read by nobody; restart postbox to \
         create them again: they begin with the oldest event in the log"
    );
    Error::new(ErrorKind::Mismatch, "acquire", "lanes_missing", message)
}

/// A store whose cursors are plain numbers needs no rebase.
pub fn rebase_not_needed() -> Error {
    let message = "only a Postgres store needs this: the cursors of the others are plain numbers";
    Error::invalid("rebase", "rebase_not_needed", message)
}

/// The subscription does not exist.
pub fn subscription_unknown(operation: &'static str, name: &SubscriptionName, known: &[String]) -> Error {
    let message = format!("there is no subscription {name}; known: {}", listed(known));
    Error::new(ErrorKind::NotFound, operation, "subscription_unknown", message)
}

/// The log does not exist.
pub fn log_unknown(operation: &'static str, log: &LogName, known: &[String]) -> Error {
    let known = listed(known);
    let message = format!("there is no log {log} (known: {known}); create it: postbox migrate up --log {log}");
    Error::new(ErrorKind::NotFound, operation, "log_unknown", message)
}

/// Checks that a store has every log that is named. `has` are its logs.
pub fn check_logs<'a>(
    operation: &'static str,
    named: impl IntoIterator<Item = &'a LogName>,
    has: &[LogName],
) -> Result<()> {
    let Some(missing) = named.into_iter().find(|log| !has.contains(log)) else { return Ok(()) };
    let known: Vec<String> = has.iter().map(ToString::to_string).collect();
    Err(log_unknown(operation, missing, &known))
}

fn listed(known: &[String]) -> String {
    if known.is_empty() { "none yet".to_owned() } else { known.join(", ") }
}

/// Checks the number of lanes of a subscription.
pub fn check_lanes(operation: &'static str, name: &SubscriptionName, lanes: u16) -> Result<()> {
    if (1..=LANES_MAX).contains(&lanes) {
        return Ok(());
    }
    let message = format!("subscription {name} cannot have {lanes} lanes; 1 to {LANES_MAX} are allowed");
    Err(Error::invalid(operation, "lanes_invalid", message))
}

/// Checks that a subscription keeps its log. It may change its filter and ordering.
pub fn check_log(asked: &Subscription, log: &LogName) -> Result<()> {
    if *log == asked.log {
        return Ok(());
    }
    let (name, wanted) = (&asked.name, &asked.log);
    let message = format!("subscription {name} reads log {log}, not {wanted}; give the new one another name");
    Err(Error::new(ErrorKind::Conflict, "subscribe", "log_differs", message))
}

/// The subscription has changed since it was looked at.
pub fn subscription_changed(operation: &'static str, name: &SubscriptionName) -> Error {
    let message =
        format!("subscription {name} was changed meanwhile; look again, and see whether this is done already");
    Error::new(ErrorKind::Conflict, operation, "subscription_changed", message)
}

/// The name belongs to another subscription.
pub fn subscription_exists(name: &SubscriptionName) -> Error {
    let message = format!("there is a subscription {name} already; choose another name, or remove that one first");
    Error::new(ErrorKind::Conflict, "rename", "subscription_exists", message)
}

/// A relay holds a lane.
pub fn lanes_held(name: &SubscriptionName) -> Error {
    let message = format!(
        "a relay holds a lane of {name}; run: postbox pause {name}, try again when its lease has ended (10 s by default), \
         and resume it then"
    );
    Error::new(ErrorKind::Conflict, "reset", "lanes_held", message)
}

/// Too many events would have to leave the stream.
pub fn lanes_apart(name: &SubscriptionName) -> Error {
    let message = format!(
        "the lanes of {name} are more than {LANES_APART_MAX} events apart; let the slowest catch up, and try again"
    );
    Error::new(ErrorKind::Conflict, "set_lanes", "lanes_apart", message)
}

/// The most rows of a subscription that change in one transaction, because they move to other lanes
/// or get another name: some seconds, in which the lanes are locked, or in SQLite all writers wait.
pub const ROWS_MOVED_MAX: i64 = 200_000;

/// Too many rows would have to change in one transaction.
pub fn rows_many(operation: &'static str, name: &SubscriptionName) -> Error {
    let which = match operation {
        // It also changes the rows of events that were sent later.
        "rename" => "wait for a retry or a time, or were sent after they had been skipped",
        _ => "or wait for a retry or a time",
    };
    let message = format!(
        "{name} has more than {ROWS_MOVED_MAX} events that are dead, discarded, {which}; retry or discard the dead ones, let the others go out, prune the log, and try again"
    );
    Error::new(ErrorKind::Conflict, operation, "rows_many", message)
}

/// Checks the id of a message from outside.
pub fn check_message_id(operation: &'static str, message_id: &str) -> Result<()> {
    if message_id.is_empty() || message_id.len() > MESSAGE_ID_BYTES_MAX || message_id.contains('\0') {
        let message = format!("the message id must have 1 to {MESSAGE_ID_BYTES_MAX} bytes and no NUL character");
        return Err(Error::invalid(operation, "message_id_invalid", message));
    }
    Ok(())
}
