//! A Postgres snapshot, as text goes over the wire: `xmin:xmax:xip,xip,…`.

use std::fmt;

use postbox_core::{Error, ErrorKind, Result};

/// Which transactions were over at one moment: those below `xmax` that are not in `xip`.
///
/// `xmax` is one more than the latest transaction that is *over*, not the next to be given out: transactions at or above it may
/// already be running, and may have drawn lower `seq` values than anything visible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) xmin: u64,
    pub(crate) xmax: u64,
    /// Ascending.
    pub(crate) xip: Vec<u64>,
}

impl Snapshot {
    /// Before the first transaction: nothing is visible in it.
    pub(crate) const ZERO: &'static str = "1:1:";

    pub(crate) fn parse(text: &str) -> Result<Self> {
        let read = || {
            let mut parts = text.split(':');
            let xmin = parts.next()?.parse().ok()?;
            let xmax = parts.next()?.parse().ok()?;
            let list = parts.next()?;
            let xip =
                if list.is_empty() { Some(Vec::new()) } else { list.split(',').map(|xid| xid.parse().ok()).collect() };
            Some(Self { xmin, xmax, xip: xip? })
        };
        read().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "read", "snapshot_invalid", format!("{text:?} is no snapshot"))
        })
    }

    /// Whether a transaction was over.
    pub(crate) fn sees(&self, xid: u64) -> bool {
        xid < self.xmin || (xid < self.xmax && self.xip.binary_search(&xid).is_err())
    }

    /// Transactions that were running here and are over in `later`: their rows are the stragglers.
    pub(crate) fn ended_by(&self, later: &Self) -> Vec<u64> {
        self.xip.iter().copied().filter(|xid| later.sees(*xid)).collect()
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:", self.xmin, self.xmax)?;
        for (index, xid) in self.xip.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{xid}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(text: &str) -> Snapshot {
        Snapshot::parse(text).expect("a snapshot")
    }

    #[test]
    fn text_round_trips() {
        for text in ["1:1:", "10:20:", "10:20:10,14,15"] {
            assert_eq!(snapshot(text).to_string(), text);
        }
        assert!(Snapshot::parse("1:x:").is_err());
    }

    #[test]
    fn running_and_future_transactions_are_not_seen() {
        let at = snapshot("10:20:10,14");
        let seen: Vec<u64> = (8..22).filter(|xid| at.sees(*xid)).collect();
        assert_eq!(seen, [8, 9, 11, 12, 13, 15, 16, 17, 18, 19]);
        assert!(!snapshot(Snapshot::ZERO).sees(1));
    }

    #[test]
    fn stragglers_are_what_ran_and_is_over() {
        assert_eq!(snapshot("10:20:10,14").ended_by(&snapshot("14:30:14,22,29")), [10]);
    }
}
