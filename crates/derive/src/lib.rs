//! `#[derive(Event)]`: makes a Rust type the events of one topic. Use it through the crate
//! `postbox`, which has the trait.
//!
//! It generates one `impl` and nothing else. Serde handles the payload.

mod attributes;
mod event;

use proc_macro::TokenStream;

/// Implements `postbox::TypedEvent` for a type.
///
/// ```
/// use serde::{Deserialize, Serialize};
///
/// #[derive(postbox::Event, Serialize, Deserialize)]
/// #[event(topic = "order.paid", key = "order", aggregate = "order", schema_version = 2)]
/// struct OrderPaid {
///     order: i64,
///     cents: i64,
/// }
///
/// # fn main() -> postbox::Result<()> {
/// # use postbox::{IntoEvents, NewEvent};
/// let paid = OrderPaid { order: 42, cents: 1990 };
/// let event = NewEvent::json("order.paid", r#"{"order":42,"cents":1990}"#).key("42").aggregate("order");
/// assert_eq!(paid.into_events()?, [event.header("schema-version", "2")]);
/// # Ok(())
/// # }
/// ```
///
/// | in `#[event(…)]` | value | meaning |
/// |---|---|---|
/// | `topic` | text, required | what happened |
/// | `key` | a field's name | events of one key are delivered in commit order; the field is written with `Display` |
/// | `schema_version` | a number from 1, the default | the schema version of the payload |
/// | `from` | a type | the type of an older version, from which this one is converted by `From` |
/// | `aggregate` | text | the kind of thing that the key names |
/// | `kind` | text | `domain`, the default, `integration`, … |
///
/// Events of an older version are read as the newer type, across any number of versions:
///
/// ```
/// # use serde::{Deserialize, Serialize};
/// #[derive(postbox::Event, Serialize, Deserialize)]
/// #[event(topic = "order.paid")]
/// struct OrderPaidV1 {
///     order: i64,
/// }
///
/// #[derive(postbox::Event, Serialize, Deserialize)]
/// #[event(topic = "order.paid", schema_version = 2, from = "OrderPaidV1")]
/// struct OrderPaid {
///     order: i64,
///     cents: Option<i64>,
/// }
///
/// impl From<OrderPaidV1> for OrderPaid {
///     fn from(OrderPaidV1 { order }: OrderPaidV1) -> Self {
///         Self { order, cents: None }
///     }
/// }
/// ```
///
/// The topic is required:
///
/// ```compile_fail
/// #[derive(postbox::Event)]
/// struct OrderPaid {
///     order: i64,
/// }
/// ```
///
/// The key must be one of the fields:
///
/// ```compile_fail
/// #[derive(postbox::Event)]
/// #[event(topic = "order.paid", key = "ordr")]
/// struct OrderPaid {
///     order: i64,
/// }
/// ```
#[proc_macro_derive(Event, attributes(event))]
pub fn derive_event(input: TokenStream) -> TokenStream {
    event::derive(input.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}
