//! Turns a broker's message into an event.

use super::binding::{Binding, decode};
use crate::error::Result;
use crate::limits::HEADERS_MAX;
use crate::names::SourceName;
use crate::receive::Inbound;
use crate::source::RawMessage;

/// Attributes that become fields of the event. The others stay headers.
const FIELDS: [&str; 8] = ["specversion", "type", "subject", "datacontenttype", "kind", "aggregate", "version", "time"];

impl Binding {
    /// Returns the event of a message. A CloudEvent in binary mode is read by its attributes; any
    /// other message by its fields as they are.
    ///
    /// The attribute `tenant` stays a header, because anyone who may publish could name any tenant.
    pub fn read(&self, message: &RawMessage, source: &SourceName) -> Result<Inbound> {
        let is = |header: &str, name: &str| {
            let rest = header.get(self.prefix.len()..);
            self.is_attribute(header) && rest.is_some_and(|rest| rest.eq_ignore_ascii_case(name))
        };
        let attribute = |name: &str| {
            let (_, value) = message.headers.iter().find(|(header, _)| is(header, name))?;
            if self.is_encoded { decode(value.as_bytes()) } else { Some(value.clone()) }
        };
        let (Some(_), Some(topic)) = (attribute("specversion"), attribute("type")) else {
            return message.clone().into_inbound(source);
        };
        let mut headers = message.headers.clone();
        headers.retain(|header, _| !FIELDS.iter().any(|name| is(header, name)));
        if headers.len() > HEADERS_MAX {
            // Too many headers: drop those that repeat known attributes, so that the event's own
            // stay.
            headers.retain(|header, _| !self.is_attribute(header));
        }
        let word = |name| attribute(name).filter(|text| !text.is_empty());
        let message = RawMessage {
            topic,
            key: word("subject").or_else(|| message.key.clone()),
            content_type: word("datacontenttype").unwrap_or_else(|| message.content_type.clone()),
            headers,
            ..message.clone()
        };
        let mut inbound = message.into_inbound(source)?;
        let event = &mut inbound.event;
        event.kind = word("kind");
        event.aggregate = word("aggregate");
        event.version = word("version").and_then(|version| version.parse().ok());
        event.occurred_at = word("time").and_then(|time| time.parse().ok());
        inbound.validate()?;
        Ok(inbound)
    }
}
