//! Entries in the server's answers. Names of fields need not be text and may occur twice, so the
//! client's own types, which are maps of text, would lose some.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use redis::{Value, from_redis_value};

/// An entry id. Ids are ordered as in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(super) struct EntryId {
    ms: u64,
    seq: u64,
}

impl EntryId {
    /// Returns the first id of a time.
    pub(super) fn at(time: Timestamp) -> Self {
        Self { ms: u64::try_from(time.as_millisecond()).unwrap_or_default(), seq: 0 }
    }

    /// Returns the id right before this one.
    pub(super) fn before(self) -> Self {
        match self.seq {
            0 => Self { ms: self.ms.saturating_sub(1), seq: if self.ms == 0 { 0 } else { u64::MAX } },
            seq => Self { seq: seq - 1, ..self },
        }
    }
}

impl FromStr for EntryId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (ms, seq) = text.split_once('-').ok_or(())?;
        let number = |digits: &str| digits.parse().map_err(drop);
        Ok(Self { ms: number(ms)?, seq: number(seq)? })
    }
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.seq)
    }
}

/// An entry. It has no fields if it is pending and no longer in the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) id: EntryId,
    pub(super) fields: Option<Vec<(Vec<u8>, Vec<u8>)>>,
}

impl Entry {
    /// Returns the size of its fields, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.fields.iter().flatten().map(|(name, value)| name.len() + value.len()).sum()
    }
}

/// The answer of `XAUTOCLAIM`.
#[derive(Debug, Default)]
pub(super) struct Claimed {
    /// Where the next call begins; zero at the end.
    pub(super) next: EntryId,
    pub(super) entries: Vec<Entry>,
    /// How many entries were pending and no longer in the stream.
    pub(super) deleted: usize,
}

/// Parses the answer of `XREADGROUP` for one stream.
pub(super) fn read(answer: Value) -> Vec<Entry> {
    let streams = match answer {
        Value::Map(streams) => streams.into_iter().map(|(_, entries)| entries).collect(),
        Value::Array(streams) => streams.into_iter().filter_map(|it| items(it).pop()).collect(),
        _ => Vec::new(),
    };
    streams.into_iter().flat_map(list).collect()
}

/// Parses the answer of `XAUTOCLAIM`.
pub(super) fn claimed(answer: Value) -> Claimed {
    let mut parts = items(answer).into_iter();
    let next = parts.next().and_then(id).unwrap_or_default();
    let entries = parts.next().map(list).unwrap_or_default();
    Claimed { next, entries, deleted: parts.next().map_or(0, |deleted| items(deleted).len()) }
}

/// Parses a list of entries, e.g. the answer of `XRANGE`.
pub(super) fn list(answer: Value) -> Vec<Entry> {
    let entry = |value| {
        let mut parts = items(value).into_iter();
        let id = parts.next().and_then(id)?;
        let fields = match parts.next()? {
            Value::Nil => None,
            fields => Some(from_redis_value(fields).ok()?),
        };
        Some(Entry { id, fields })
    };
    items(answer).into_iter().filter_map(entry).collect()
}

fn id(value: Value) -> Option<EntryId> {
    from_redis_value::<String>(value).ok()?.parse().ok()
}

fn items(value: Value) -> Vec<Value> {
    match value {
        Value::Array(items) => items,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn entry(id: &str, fields: Value) -> Value {
        Value::Array(vec![text(id), fields])
    }

    #[test]
    fn ids_are_in_the_order_of_the_stream() {
        let id = |text: &str| text.parse::<EntryId>().expect("an id");
        assert!(id("9-1") < id("10-0") && id("10-2") < id("10-10"));
        assert_eq!(id("10-2").before(), id("10-1"));
        assert_eq!(id("10-0").before(), EntryId { ms: 9, seq: u64::MAX });
        assert_eq!(EntryId::default().before(), EntryId::default());
        assert!("10".parse::<EntryId>().is_err());
    }

    #[test]
    fn both_protocols_answers_are_read() {
        let fields =
            Value::Array(vec![Value::BulkString(vec![0xff]), text("1"), Value::BulkString(vec![0xff]), text("2")]);
        let entries = Value::Array(vec![entry("5-1", fields), entry("5-2", Value::Nil)]);
        let resp2 = Value::Array(vec![Value::Array(vec![text("s"), entries.clone()])]);
        let resp3 = Value::Map(vec![(text("s"), entries.clone())]);
        let expected = [
            Entry {
                id: EntryId { ms: 5, seq: 1 },
                fields: Some(vec![(vec![0xff], b"1".into()), (vec![0xff], b"2".into())]),
            },
            Entry { id: EntryId { ms: 5, seq: 2 }, fields: None },
        ];
        assert_eq!(read(resp2), expected);
        assert_eq!(read(resp3), expected);
        assert_eq!(read(Value::Nil), []);
        let claimed = claimed(Value::Array(vec![text("0-0"), entries, Value::Array(vec![text("4-1")])]));
        assert_eq!((claimed.next, claimed.entries.as_slice(), claimed.deleted), (EntryId::default(), &expected[..], 1));
    }
}
