//! What payloads look like, as the append and the router ask for it.

use std::fmt;

use crate::error::Result;

/// Says whether a payload is as its topic says. `postbox_schema::JsonSchemas` is one.
///
/// Behaviour:
/// - A topic, or a version of the payload's form, that it does not know is no error.
/// - A payload that is not as it should be is
///   [`Error::schema_violated`](crate::Error::schema_violated), with every issue in it.
/// - Pure: no I/O. It is asked for each event.
pub trait Schemas: fmt::Debug + Send + Sync + 'static {
    /// Checks a payload.
    fn check(&self, topic: &str, schema_version: u32, payload: &[u8]) -> Result<()>;
}

const _: Option<&dyn Schemas> = None;
