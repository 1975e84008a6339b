//! Events that were named: how they stood before anything was changed, and why nothing was.

use postbox_core::{EventId, Record, Store, SubscriptionInfo};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

/// What a command can do to an event as it stands.
pub(super) enum Stand {
    /// It changes it.
    Moves,
    /// It may have to leave it as it is, and then for this reason.
    MayMove(String),
    /// Nothing, and why.
    Stays(String),
}

/// How the named events stood.
#[derive(Default)]
pub(super) struct Named {
    /// Those that are not there: the first, and how many more.
    unknown: Option<(EventId, usize)>,
    stays: Vec<String>,
    may_move: Vec<String>,
}

impl Named {
    /// Looks at each in each subscription. Where one has something to change, the others are not
    /// spoken of.
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

    /// Why naming an event changed nothing, which is no failure.
    pub(super) fn explain(&self, nothing: bool) {
        self.stays.iter().for_each(|text| output::note(text));
        if nothing {
            self.may_move.iter().for_each(|text| output::note(text));
        }
    }

    /// An event that is not there is a failure.
    pub(super) fn known(&self, context: &Context, infos: &[SubscriptionInfo]) -> Result<(), Failure> {
        let Some((first, more)) = self.unknown else { return Ok(()) };
        let more = if more > 0 { format!(", nor {more} other(s) of those named") } else { String::new() };
        Err(context.no_event(infos.first().map(|info| &info.log), &format!("{first}{more}")))
    }

    /// Whether all of them are there.
    pub(super) fn are_known(&self) -> bool {
        self.unknown.is_none()
    }
}
