//! Events that are your own types, and everything that can be appended.

use std::marker::PhantomData;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};
use crate::event::{Event, NewEvent, header};

/// A type whose values are the events of one topic. `#[derive(Event)]` of the crate `postbox`
/// implements it. With serde, its values are the payload as JSON.
///
/// ```
/// use postbox_core::{NewEvent, TypedEvent};
///
/// struct OrderPaid {
///     order: i64,
/// }
///
/// impl TypedEvent for OrderPaid {
///     const TOPIC: &'static str = "order.paid";
///
///     fn describe(&self, event: NewEvent) -> NewEvent {
///         event.key(self.order.to_string())
///     }
/// }
/// ```
pub trait TypedEvent {
    /// The topic of every value.
    const TOPIC: &'static str;

    /// The schema version of the payload, from 1. It is in the header [`header::SCHEMA_VERSION`],
    /// which is left out for 1.
    const SCHEMA_VERSION: u32 = 1;

    /// Adds what the value says besides its payload: the key, the kind of aggregate, headers …
    fn describe(&self, event: NewEvent) -> NewEvent {
        event
    }

    /// Returns whether events of this schema version can be read as the type.
    fn reads(version: u32) -> bool {
        version == Self::SCHEMA_VERSION
    }

    /// Reads an event of another version that the type [reads](Self::reads): decodes it as the type
    /// of that version with [`decode`], then converts it. The derive implements it for
    /// `from = "…"`.
    fn upcast(event: &Event) -> Result<Self>
    where
        Self: Sized,
    {
        Err(version_differs::<Self>(event))
    }
}

/// The code of a typed event whose payload cannot be encoded.
const NOT_ENCODED: &str = "payload_not_encoded";
/// The code of an event whose payload cannot be decoded as the type.
const NOT_DECODED: &str = "payload_not_decoded";
/// The code of an event whose schema version the type does not read.
const VERSION_DIFFERS: &str = "schema_version_differs";

fn encode<T: TypedEvent + Serialize>(typed: &T) -> Result<NewEvent> {
    let payload = serde_json::to_vec(typed).map_err(|error| {
        let message = format!("the event {} cannot be written as JSON: {error}", T::TOPIC);
        Error::invalid("append", NOT_ENCODED, message).with_source(error)
    })?;
    let event = NewEvent::json(T::TOPIC, payload);
    let event = match T::SCHEMA_VERSION {
        1 => event,
        version => event.schema_version(version),
    };
    Ok(typed.describe(event))
}

/// Decodes a stored event as the type.
///
/// Errors (`Invalid`): `schema_version_differs`, `payload_not_decoded`. The topic is not checked.
pub fn decode<T: TypedEvent + DeserializeOwned>(event: &Event) -> Result<T> {
    match event.schema_version() {
        Some(version) if version == T::SCHEMA_VERSION => {}
        Some(version) if T::reads(version) => return T::upcast(event),
        _ => return Err(version_differs::<T>(event)),
    }
    serde_json::from_slice(&event.payload).map_err(|error| {
        // serde's error does not become the source: it may quote the payload, and sources go into
        // logs.
        let (line, column) = (error.line(), error.column());
        let cause = unquoted(&error.to_string()).map(|cause| format!(": {cause}")).unwrap_or_default();
        let message = format!("the payload is no {} (line {line}, column {column}){cause}", std::any::type_name::<T>());
        Error::invalid("decode", NOT_DECODED, message)
    })
}

/// What serde says of a payload, without the value that it quotes: errors go into logs and traces.
/// `None` for any other text: it is a field's own, and may quote the payload in any form.
fn unquoted(said: &str) -> Option<String> {
    let begins = |forms: &[&str]| forms.iter().any(|form| said.starts_with(form));
    // These name a field of the type.
    if begins(&["missing field `", "duplicate field `"]) {
        return Some(said.to_owned());
    }
    if !begins(&["invalid type: ", "invalid value: ", "invalid length ", "unknown variant `", "unknown field `"]) {
        return None;
    }
    // The last of them: a value may contain such words, too.
    let rest = [", expected", ", there are"].iter().filter_map(|rest| said.rfind(rest)).max()?;
    let found = said[..rest].find(['"', '`']).map_or(&said[..rest], |quote| said[..quote].trim_end());
    Some(format!("{found}{}", &said[rest..]))
}

fn version_differs<T: TypedEvent>(event: &Event) -> Error {
    let version = header::find(&event.headers, header::SCHEMA_VERSION).unwrap_or("1");
    let message = format!(
        "the event has schema version {version:?}, {} is version {} and cannot be made from it; handle both, or deploy the program that reads it",
        std::any::type_name::<T>(),
        T::SCHEMA_VERSION
    );
    Error::invalid("decode", VERSION_DIFFERS, message)
}

/// One event to append: a [`NewEvent`], or a [`TypedEvent`], or a reference to one.
///
/// `Kind` separates these for the compiler. It is inferred.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no event",
    note = "an event is a `NewEvent`, or a type with `#[derive(postbox::Event, serde::Serialize)]`"
)]
pub trait IntoEvent<Kind> {
    /// Converts to an event to append.
    fn into_event(self) -> Result<NewEvent>;
}

/// Marks [`NewEvent`]s.
#[derive(Debug)]
pub enum Untyped {}
/// Marks values of a type.
#[derive(Debug)]
pub enum Typed {}
/// Marks references to them.
#[derive(Debug)]
pub enum Borrowed {}

impl IntoEvent<Untyped> for NewEvent {
    fn into_event(self) -> Result<NewEvent> {
        Ok(self)
    }
}

impl IntoEvent<Untyped> for &NewEvent {
    fn into_event(self) -> Result<NewEvent> {
        Ok(self.clone())
    }
}

impl<T: TypedEvent + Serialize> IntoEvent<Typed> for T {
    fn into_event(self) -> Result<NewEvent> {
        encode(&self)
    }
}

impl<T: TypedEvent + Serialize> IntoEvent<Borrowed> for &T {
    fn into_event(self) -> Result<NewEvent> {
        encode(self)
    }
}

/// What [`Postbox::append`](crate::Postbox::append) takes: one event, or anything that yields
/// events, such as a slice, an array, a `Vec` or an iterator.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no event, and does not give events in turn",
    note = "an event is a `NewEvent`, or a type with `#[derive(postbox::Event, serde::Serialize)]`"
)]
pub trait IntoEvents<Kind> {
    /// Converts to events, in order.
    fn into_events(self) -> Result<Vec<NewEvent>>;
}

/// Marks one event.
#[derive(Debug)]
pub struct One<Kind>(PhantomData<Kind>);
/// Marks several.
#[derive(Debug)]
pub struct Many<Kind>(PhantomData<Kind>);
/// Marks a `Result`, which has to be unwrapped first (`?`).
#[derive(Debug)]
pub struct NotUnwrapped<Kind>(PhantomData<Kind>);

/// Makes an append of a `Result` ambiguous, and so an error of the compiler. As an iterator, one
/// that failed would append nothing, and nobody would notice.
impl<T: IntoEvent<Kind>, E, Kind> IntoEvents<NotUnwrapped<Kind>> for Result<T, E> {
    fn into_events(self) -> Result<Vec<NewEvent>, Error> {
        Ok(Vec::new())
    }
}

/// The same for a reference to one, which is an iterator too.
impl<'a, T, E, Kind> IntoEvents<NotUnwrapped<Kind>> for &'a Result<T, E>
where
    &'a T: IntoEvent<Kind>,
{
    fn into_events(self) -> Result<Vec<NewEvent>, Error> {
        Ok(Vec::new())
    }
}

impl<E: IntoEvent<Kind>, Kind> IntoEvents<One<Kind>> for E {
    fn into_events(self) -> Result<Vec<NewEvent>> {
        Ok(vec![self.into_event()?])
    }
}

impl<I, Kind> IntoEvents<Many<Kind>> for I
where
    I: IntoIterator,
    I::Item: IntoEvent<Kind>,
{
    fn into_events(self) -> Result<Vec<NewEvent>> {
        self.into_iter().map(IntoEvent::into_event).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::event::EventId;

    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    struct Paid {
        order: i64,
    }

    impl TypedEvent for Paid {
        const TOPIC: &'static str = "order.paid";
        const SCHEMA_VERSION: u32 = 2;

        fn describe(&self, event: NewEvent) -> NewEvent {
            event.key(self.order.to_string())
        }
    }

    /// JSON has no keys that are not text.
    #[derive(serde::Serialize)]
    struct Map(BTreeMap<Vec<u8>, u8>);

    impl TypedEvent for Map {
        const TOPIC: &'static str = "map";
    }

    fn events<Kind>(events: impl IntoEvents<Kind>) -> Result<Vec<NewEvent>> {
        events.into_events()
    }

    fn stored(event: NewEvent) -> Event {
        event.into_event(EventId::now_v7(), jiff::Timestamp::UNIX_EPOCH)
    }

    #[test]
    fn one_and_several_typed_and_untyped_are_events() {
        let paid = || Paid { order: 42 };
        let new = || NewEvent::json("order.paid", r#"{"order":42}"#).key("42").schema_version(2);
        let one = vec![new()];
        let (typed, untyped) = (paid(), new());
        assert_eq!(events(&typed).expect("written"), one);
        assert_eq!(events(typed).expect("written"), one);
        assert_eq!(events(&untyped).expect("written"), one);
        assert_eq!(events(untyped).expect("written"), one);
        let two = vec![new(), new()];
        assert_eq!(events([paid(), paid()]).expect("written"), two);
        assert_eq!(events(&[paid(), paid()]).expect("written"), two);
        assert_eq!(events(vec![new(), new()]).expect("written"), two);
        assert_eq!(events(two.as_slice()).expect("written"), two);
        assert_eq!(events((0..2).map(|_| paid())).expect("written"), two);
        assert!(events(None::<Paid>).expect("written").is_empty());
    }

    #[test]
    fn what_cannot_be_written_is_refused_with_a_code() {
        let map = Map(BTreeMap::from([(vec![1], 1)]));
        assert_eq!(events(&map).expect_err("refused").code(), "payload_not_encoded");
        assert_eq!(events([map]).expect_err("refused").code(), "payload_not_encoded");
    }

    #[test]
    fn an_event_is_read_as_what_it_was() {
        assert_eq!(
            decode::<Paid>(&stored(Paid { order: 7 }.into_event().expect("written"))).expect("written"),
            Paid { order: 7 }
        );
    }

    /// Made from version 2.
    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct PaidIn {
        order: i64,
        currency: String,
    }

    impl TypedEvent for PaidIn {
        const TOPIC: &'static str = Paid::TOPIC;
        const SCHEMA_VERSION: u32 = 3;

        fn reads(version: u32) -> bool {
            version == 3 || Paid::reads(version)
        }

        fn upcast(event: &Event) -> Result<Self> {
            decode(event).map(|Paid { order }| Self { order, currency: "EUR".into() })
        }
    }

    #[test]
    fn an_event_of_an_older_version_is_made_a_newer_one() {
        let event = |version: u32, payload: &str| {
            stored(NewEvent::json(Paid::TOPIC, payload.to_owned()).header("schema-version", version.to_string()))
        };
        let read = |event: &Event| decode::<PaidIn>(event).map_err(|error| error.code().to_owned());
        let paid = |currency: &str| Ok(PaidIn { order: 7, currency: currency.into() });
        assert_eq!(read(&event(2, r#"{"order":7}"#)), paid("EUR"));
        assert_eq!(read(&event(3, r#"{"order":7,"currency":"CHF"}"#)), paid("CHF"));
        assert_eq!(read(&event(2, "{}")), Err("payload_not_decoded".into()));
        assert_eq!(read(&event(1, r#"{"order":7}"#)), Err("schema_version_differs".into()));
        let new = || NewEvent::json(Paid::TOPIC, r#"{"order":7}"#);
        let cased = |version: &str| stored(new().header("Schema-Version", version));
        assert_eq!(read(&cased("2")), paid("EUR"));
        let error = decode::<PaidIn>(&cased("9")).expect_err("refused");
        assert!(error.message().contains("schema version \"9\""), "{error}");
    }

    #[test]
    fn another_version_and_another_form_have_codes_of_their_own() {
        let code = |event: NewEvent| decode::<Paid>(&stored(event)).expect_err("refused").code().to_owned();
        let new = |payload: &str| NewEvent::json("order.paid", payload.to_owned());
        for version in ["1", "3", "two", ""] {
            assert_eq!(code(new(r#"{"order":7}"#).header("schema-version", version)), "schema_version_differs");
        }
        assert_eq!(code(new(r#"{"order":7}"#)), "schema_version_differs", "none means 1");
        for payload in ["", "{}", r#"{"order":"secret"}"#, "\u{0}"] {
            let event = stored(new(payload).schema_version(2));
            let error = decode::<Paid>(&event).expect_err("refused");
            assert_eq!(error.code(), "payload_not_decoded");
            let chain: Vec<_> =
                std::iter::successors(Some(&error as &dyn std::error::Error), |it| it.source()).collect();
            assert!(!format!("{chain:?}").contains("secret"), "{chain:?}");
        }
    }

    #[test]
    fn only_what_serde_says_in_its_own_words_is_repeated() {
        for (said, repeated) in [
            ("missing field `order` at line 1 column 2", Some("missing field `order` at line 1 column 2")),
            ("invalid type: string \"a, expected b\", expected i64", Some("invalid type: string, expected i64")),
            ("unknown field `a, expected b`, there are no fields", Some("unknown field, there are no fields")),
            ("invalid length 3, expected a tuple of size 2", Some("invalid length 3, expected a tuple of size 2")),
            ("parsed value '1', but unparsed input \"2\" remains (expected no unparsed input)", None),
            ("no date: secret, expected another", None),
        ] {
            assert_eq!(unquoted(said).as_deref(), repeated, "{said}");
        }
    }
}
