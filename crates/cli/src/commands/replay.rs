//! `postbox replay`: sends events again that were delivered or skipped, to one subscription.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use postbox_core::limits::CHANGE_EVENTS_MAX;
use postbox_core::{Error, Rate, Record, Replay, Seq, State};
use postbox_engine::step_pause;
use postbox_server::text::grouped;
use tokio::select;

use super::named::{Named, Stand};
use super::steps::{LESS_IF_DONE, MAY_BE_DONE, counted, with_limit};
use crate::context::Context;
use crate::failure::{Failure, is_refused};
use crate::output;
use crate::signals::stopped;

/// Interval between progress notes of a long run, at a terminal.
const NOTE_EVERY: Duration = Duration::from_secs(1);

pub(super) async fn run(context: &Context, mut replay: Replay, rate: Option<Rate>, json: bool) -> Result<(), Failure> {
    let store = context.store_to_change().await?;
    let infos = context.some_registered(store.as_ref()).await?;
    let [info] = infos.as_slice() else {
        let names: Vec<&str> = infos.iter().map(|info| info.name.as_str()).collect();
        let which = names.join(", ");
        return Err(Failure::usage(format!(
            "a replay is for one subscription; add --subscription with one of: {which}"
        )));
    };
    if replay.ids.as_ref().is_some_and(|ids| ids.len() > CHANGE_EVENTS_MAX) {
        return Err(Failure::usage(format!("give at most {CHANGE_EVENTS_MAX} ids at a time")));
    }
    let named = Named::look(store.as_ref(), &infos, replay.ids.as_deref().unwrap_or_default(), stand).await?;
    // With a rate, a step is what may go out in a second.
    let step_max = rate.map_or(CHANGE_EVENTS_MAX, |rate| rate.within(Duration::from_secs(1)).min(CHANGE_EVENTS_MAX));
    let (mut left, mut count, mut noted) = (replay.limit, 0, Instant::now());
    let mut stop = std::pin::pin!(stopped());
    let ended = loop {
        replay.limit = Some(left.unwrap_or(usize::MAX).min(step_max));
        let began = Instant::now();
        let step = match store.replay(&info.name, &replay).await {
            Ok(step) => step,
            Err(error) => break Err(failed(error, &replay, left)),
        };
        count += step.count;
        (replay.after, replay.through) = (step.next, Some(step.through));
        left = left.map(|left| left.saturating_sub(usize::try_from(step.count).unwrap_or(usize::MAX)));
        let Some(next) = step.next.filter(|_| left != Some(0)) else { break Ok(()) };
        if noted.elapsed() >= NOTE_EVERY && std::io::stderr().is_terminal() {
            output::note(&format!("{} sent again, up to place {next} of {}", grouped(count), step.through));
            noted = Instant::now();
        }
        let rate = rate.filter(|_| !replay.dry_run);
        let of_rate =
            rate.map_or(Duration::ZERO, |rate| rate.interval() * u32::try_from(step.count).unwrap_or(u32::MAX));
        let pause = of_rate.max(step_pause(began.elapsed()));
        select! {
            biased;
            () = &mut stop => break Err(interrupted(next, step.through, left)),
            () = tokio::time::sleep(pause) => {}
        }
    };
    named.end(context, &infos, count, ended, |ended| {
        if ended.is_ok() || count > 0 {
            counted("replayed", count, replay.dry_run, json);
        }
        if ended.is_ok() && count == 0 && replay.ids.is_none() {
            output::note(
                "no selected event was delivered or skipped; pending events are delivered by themselves, dead ones by \
                 `postbox retry`, expired ones not at all",
            );
        }
        ended
    })
}

/// Returns what a replay can do to this event.
fn stand(record: &Record) -> Stand {
    let why = match (record.state, record.event.expires_at) {
        // Whether it has expired is decided by the store's clock.
        (State::Dispatched | State::Skipped | State::Unrouted, Some(end)) => {
            return Stand::MayMove(format!("it expired at {end}; append it again if it is still wanted"));
        }
        (State::Dispatched | State::Skipped | State::Unrouted, None) => return Stand::Moves,
        (State::Dead, _) => "it was not delivered; `postbox retry` sends it",
        (State::Discarded, _) => "discarded events are not sent again",
        (State::Retrying | State::Blocked | State::Pending | State::Scheduled, _) => {
            "it is pending, and is delivered by itself"
        }
    };
    Stand::Stays(why.to_owned())
}

/// The same command would start from the beginning again.
fn interrupted(next: Seq, through: Seq, left: Option<usize>) -> Failure {
    Failure::failed(format!("interrupted; {}", rest(next, through, left)))
}

/// Where to continue after a step that failed, and whether it may have been done.
fn failed(error: Error, replay: &Replay, left: Option<usize>) -> Failure {
    let may = if replay.dry_run || is_refused(&error) { "" } else { MAY_BE_DONE };
    let less = if may.is_empty() || left.is_none() { "" } else { LESS_IF_DONE };
    match (Failure::from(error), replay.after, replay.through) {
        (failure, Some(next), Some(through)) => {
            Failure::failed(format!("{}{may}; {}{less}", failure.text(), rest(next, through, left)))
        }
        (Failure::Failed(text), ..) => Failure::failed(text + may),
        (failure, ..) => failure,
    }
}

fn rest(next: Seq, through: Seq, left: Option<usize>) -> String {
    let limited = with_limit(left);
    format!("to continue with the rest, give --after {next} --through {through} instead of your own{limited}")
}

#[cfg(test)]
mod tests {
    use postbox_core::ErrorKind;

    use super::*;

    #[test]
    fn a_step_may_have_been_done_if_its_answer_is_lost_also_the_first() {
        let first = Replay::default();
        let later = Replay { after: Some(Seq(7)), through: Some(Seq(9)), ..Replay::default() };
        let said = |kind, replay: &Replay| {
            failed(Error::new(kind, "replay", "code", "it failed"), replay, None).text().to_owned()
        };
        assert_eq!(said(ErrorKind::Unavailable, &first), format!("it failed (code){MAY_BE_DONE}"));
        let lost = format!("it failed (code){MAY_BE_DONE}; {}", rest(Seq(7), Seq(9), None));
        assert_eq!(said(ErrorKind::Unavailable, &later), lost);
        assert_eq!(said(ErrorKind::Mismatch, &first), "it failed (code)");
        assert_eq!(said(ErrorKind::Unavailable, &Replay { dry_run: true, ..first }), "it failed (code)");
    }
}
