//! A unit of work: the events that aggregates recorded while they changed are appended together.

use crate::error::{Error, Result};
use crate::event::NewEvent;
use crate::typed::{IntoEvent, IntoEvents};

/// An object that changes as a whole and records what happened to it.
pub trait Aggregate {
    /// Returns the record of its events.
    fn recorded(&mut self) -> &mut Recorded;
}

/// Events that wait for their append. An aggregate has one for its own events; a unit of work has
/// one for those of several aggregates.
///
/// ```
/// use postbox_core::{Aggregate, NewEvent, Postbox, Recorded, Result};
/// # use postbox_memory::MemoryStore;
///
/// #[derive(Default)]
/// struct Order {
///     id: i64,
///     recorded: Recorded,
/// }
///
/// impl Order {
///     fn pay(&mut self) {
///         // … its rules, and then: a typed event, or a `NewEvent`
///         self.recorded.record(NewEvent::json("order.paid", "{}").key(self.id.to_string()));
///     }
/// }
///
/// impl Aggregate for Order {
///     fn recorded(&mut self) -> &mut Recorded {
///         &mut self.recorded
///     }
/// }
///
/// # fn example(store: MemoryStore, mut order: Order, mut other: Order) -> Result<()> {
/// order.pay();
/// other.pay();
/// let mut work = Recorded::new();
/// work.take(&mut order).take(&mut other);
/// let mut tx = store.begin(); // … in which both are saved
/// Postbox::new(store).append(&mut tx, &work)?; // both events, one round trip
/// tx.commit();
/// # Ok(())
/// # }
/// ```
///
/// Behaviour:
/// - Events are appended in the order in which they were taken, those of an aggregate in the order
///   it recorded them.
/// - Events reach the log only by [`Postbox::append`](crate::Postbox::append) and your commit: not
///   after a rollback, a panic, or if the unit of work is dropped.
/// - The append borrows it. After a rollback it still has all events for another transaction. They
///   do not go back to the aggregates. If the answer of the commit was lost, look first whether it
///   happened, or give the events ids of their own: without one, they get new ids and are appended
///   twice.
/// - If an event cannot be written as JSON, the append fails with that error, and nothing is sent.
#[derive(Debug, Default)]
#[must_use = "what is recorded reaches nobody before it is appended"]
pub struct Recorded {
    events: Vec<NewEvent>,
    /// Error of the first event that could not be encoded. Kept here so that recording cannot fail.
    fault: Option<Error>,
}

impl Recorded {
    /// Creates an empty record.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an event, typed or not.
    pub fn record<Kind>(&mut self, event: impl IntoEvent<Kind>) {
        match event.into_event() {
            Ok(event) => self.events.push(event),
            Err(error) => self.fault = self.fault.take().or(Some(error)),
        }
    }

    /// Takes everything an aggregate has recorded, and leaves its record empty.
    pub fn take(&mut self, aggregate: &mut (impl Aggregate + ?Sized)) -> &mut Self {
        let taken = std::mem::take(aggregate.recorded());
        self.events.extend(taken.events);
        self.fault = self.fault.take().or(taken.fault);
        self
    }

    /// Returns the events, in order. Fails as the append would, if one could not be encoded.
    pub fn events(&self) -> Result<&[NewEvent]> {
        match &self.fault {
            None => Ok(&self.events),
            Some(fault) => Err(Error::new(fault.kind(), "append", fault.code().to_owned(), fault.message())),
        }
    }
}

impl IntoEvents<Recorded> for &Recorded {
    fn into_events(self) -> Result<Vec<NewEvent>> {
        self.events().map(<[NewEvent]>::to_vec)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::typed::TypedEvent;

    #[derive(Default)]
    struct Account {
        recorded: Recorded,
    }

    impl Account {
        fn moved(names: &[&'static str]) -> Self {
            let mut account = Self::default();
            names.iter().for_each(|name| account.recorded.record(NewEvent::json(*name, "{}")));
            account
        }
    }

    impl Aggregate for Account {
        fn recorded(&mut self) -> &mut Recorded {
            &mut self.recorded
        }
    }

    /// JSON has no keys that are not text.
    #[derive(serde::Serialize)]
    struct Map(BTreeMap<Vec<u8>, u8>);

    impl TypedEvent for Map {
        const TOPIC: &'static str = "map";
    }

    fn topics(work: &Recorded) -> Vec<&str> {
        work.events().expect("encoded").iter().map(|event| event.topic.as_str()).collect()
    }

    #[test]
    fn events_are_taken_once_and_in_order() {
        let (mut one, mut two) = (Account::moved(&["1", "2"]), Account::moved(&["3"]));
        let mut work = Recorded::new();
        let aggregates: [&mut dyn Aggregate; 2] = [&mut one, &mut two];
        aggregates.into_iter().for_each(|aggregate| _ = work.take(aggregate));
        work.take(&mut one);
        assert_eq!(topics(&work), ["1", "2", "3"]);
        one.recorded.record(NewEvent::json("4", "{}"));
        assert_eq!(topics(work.take(&mut one)), ["1", "2", "3", "4"]);
    }

    #[test]
    fn what_cannot_be_written_is_the_error_of_the_append() {
        let mut account = Account::moved(&["1"]);
        account.recorded.record(Map(BTreeMap::from([(vec![1], 1)])));
        let mut work = Recorded::new();
        work.take(&mut account).take(&mut Account::moved(&["2"]));
        for _ in 0..2 {
            let error = work.into_events().expect_err("refused");
            assert_eq!((error.code(), error.operation()), ("payload_not_encoded", "append"));
        }
    }

    #[test]
    fn a_conflict_names_what_has_changed() {
        let error = Error::version_conflict("order", 42, 3);
        assert_eq!((error.kind(), error.code()), (crate::ErrorKind::Conflict, "version_conflict"));
        assert!(error.message().starts_with("order 42 is no longer at version 3: "), "{error}");
    }
}
