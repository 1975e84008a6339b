//! Events given by id: their state before a change, and why a change did nothing.

use postbox_core::{EventId, Record, Store, SubscriptionInfo};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

/// What a command can do to an event in its state.
pub(super) enum Stand {
    /// It changes the event.
    Moves,
    /// It may change the event. If not, this is the reason.
    MayMove(String),
    /// It cannot change the event, for this reason.
    Stays(String),
}

/// The states of the named events.
#[derive(Default)]
pub(super) struct Named {
    /// Those that do not exist: the first, and the number of others.
    unknown: Option<(EventId, usize)>,
    stays: Vec<String>,
    may_move: Vec<String>,
}

impl Named {
    /// Looks up each event in each subscription. If one subscription has something to change,
    /// nothing is reported about the others.
    pub(super) async fn look(
        store: &dyn Store,
        infos: &[SubscriptionInfo],
        ids: &[EventId],
        stand: impl Fn(&Record) -> Stand,
    ) -> Result<Self, Failure> {
        let mut named = Self::default();
        for id in ids {
            let (mut known, mut moves, mut stays) = (false, false, Vec::new());
            for info in infos {
                let Some(record) = store.get(&info.name, *id).await? else { continue };
                known = true;
                let text = |why| format!("{id} is {} in {}: {why}", record.state, info.name);
                match stand(&record) {
                    Stand::Moves => moves = true,
                    Stand::MayMove(why) => {
                        moves = true;
                        named.may_move.push(text(why));
                    }
                    Stand::Stays(why) => stays.push(text(why)),
                }
            }
            if !known {
                named.unknown = Some(named.unknown.map_or((*id, 0), |(first, more)| (first, more + 1)));
            } else if !moves {
                named.stays.append(&mut stays);
            }
        }
        Ok(named)
    }

    /// Ends a command that changed `count` events. `finish` prints the count and returns how the
    /// change `ended`; it is not called if nothing changed because an event does not exist.
    pub(super) fn end(
        self,
        context: &Context,
        infos: &[SubscriptionInfo],
        count: u64,
        ended: Result<(), Failure>,
        finish: impl FnOnce(Result<(), Failure>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let nothing = ended.is_ok() && count == 0;
        // Naming an event that did not change is not a failure.
        if ended.is_ok() {
            self.stays.iter().for_each(|text| output::note(text));
        }
        if nothing {
            self.may_move.iter().for_each(|text| output::note(text));
        }
        if !nothing || self.unknown.is_none() {
            finish(ended)?;
        }
        let Some((first, more)) = self.unknown else { return Ok(()) };
        let more = if more > 0 { format!(", nor {more} other(s) of those named") } else { String::new() };
        Err(context.no_event(infos.first().map(|info| &info.log), &format!("{first}{more}")))
    }
}
