//! Schemas of payloads, as the append and the router use them.

use std::fmt;

use crate::error::Result;

/// Checks whether a payload matches the schema of its topic. `postbox_schema::JsonSchemas`
/// implements this.
///
/// Behaviour:
/// - An unknown topic or schema version is no error.
/// - A payload that breaks its schema is [`Error::schema_violated`](crate::Error::schema_violated),
///   with its issues.
/// - Pure: no I/O. It is called for each event.
pub trait Schemas: fmt::Debug + Send + Sync + 'static {
    /// Checks a payload.
    fn check(&self, topic: &str, schema_version: u32, payload: &[u8]) -> Result<()>;

    /// Returns whether the topic has a schema. If so, its events must have a version that is a
    /// number.
    fn knows(&self, _topic: &str) -> bool {
        true
    }
}

const _: Option<&dyn Schemas> = None;
