//! Turns a broker's message into an event.

use sha2::{Digest as _, Sha256};

use super::binding::{Binding, decode};
use crate::error::Result;
use crate::event::{Headers, header_bytes};
use crate::hex::hex;
use crate::limits::{HEADER_BYTES_MAX, HEADERS_MAX, MESSAGE_ID_BYTES_MAX};
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
        let is = |header: &str, name: &str| self.is_named(header, name);
        let attribute = |name: &str| self.attribute(&message.headers, name);
        let (Some(_), Some(topic)) = (attribute("specversion"), attribute("type")) else {
            return message.clone().into_inbound(source);
        };
        let mut headers = message.headers.clone();
        headers.retain(|header, _| !FIELDS.iter().any(|name| is(header, name)));
        if headers.len() > HEADERS_MAX || header_bytes(&headers) > HEADER_BYTES_MAX {
            // Too many, or too large: drop those that repeat known attributes, so that the event's
            // own stay.
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

    /// Returns an id for a CloudEvent in binary mode; `None` if it is none. It is made of the
    /// attributes `source` and `id`, which are unique only together (CloudEvents 1.0, `source`).
    pub fn id_of(&self, headers: &Headers) -> Option<String> {
        let attribute = |name| self.attribute(headers, name);
        attribute("specversion")?;
        let id = attribute("id").filter(|id| !id.is_empty())?;
        let id = attribute("source").map_or_else(|| id.clone(), |source| format!("{source} {id}"));
        if id.len() <= MESSAGE_ID_BYTES_MAX {
            return Some(id);
        }
        Some(hex(&Sha256::digest(id)))
    }

    /// Returns whether a header is the attribute of this name.
    pub fn is_named(&self, header: &str, name: &str) -> bool {
        let rest = header.get(self.prefix.len()..);
        self.is_attribute(header) && rest.is_some_and(|rest| rest.eq_ignore_ascii_case(name))
    }

    fn attribute(&self, headers: &Headers, name: &str) -> Option<String> {
        let (_, value) = headers.iter().find(|(header, _)| self.is_named(header, name))?;
        if self.is_encoded { decode(value.as_bytes()) } else { Some(value.clone()) }
    }
}
