//! Which of the rows that left the stream may go.

use std::collections::HashSet;

use crate::names::Key;

/// Looks at a lane's rows in `seq` order and lets pass, of each key, the head and what directly
/// follows it: behind a row that has to wait, nothing of its key goes.
#[derive(Debug, Default)]
pub struct DueOrder {
    open: HashSet<Key>,
}

impl DueOrder {
    /// Whether a row may go. `holds`: the key it holds, if it holds one. `goes_first`: it is the
    /// first of its key, or holds none, and its time has come. `may_follow`: it may go right after
    /// the row before it.
    pub fn admits(&mut self, holds: Option<&Key>, goes_first: bool, may_follow: bool) -> bool {
        let Some(key) = holds else { return goes_first };
        let goes = goes_first || (may_follow && self.open.contains(key));
        if goes {
            self.open.insert(key.clone());
        } else {
            self.open.remove(key);
        }
        goes
    }
}
