//! Turns an event into its request.
//!
//! | header | value |
//! |---|---|
//! | `content-type` | the envelope's: of the payload, or of the object around it |
//! | `webhook-id` | [`Delivery::dedupe_id`]: the event id, or a fresh id for each replay a person asked for |
//! | `webhook-timestamp`, `webhook-signature` | Standard Webhooks, made anew for each attempt over the body as it is sent (the signature only with keys) |
//! | `ce-…` | the attributes of the envelope, if they are not in the body: [`Binding::HTTP`] |
//! | the event's own headers | as they are, unless reserved |
//!
//! An event's header is *reserved*, and left out, if HTTP itself, Postbox, a credential or a proxy
//! uses its name ([`is_ours`], [`is_of_one_request`]), or if the target's configuration sets it. So
//! no event can pose as another or as a proxy, smuggle a request or send credentials to a target.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use jiff::Timestamp;
use postbox_core::envelope::Binding;
use postbox_core::{Delivery, Envelope, Outcome};
use postbox_webhook::UnixSeconds;
use postbox_webhook::standard::{ID_HEADER, Signer, TIMESTAMP_HEADER};

use crate::reserved::{hyphenated, is_of_one_request, is_ours};

/// What is the same in every request to a target.
pub(crate) struct Template {
    pub(crate) envelope: Envelope,
    pub(crate) signer: Option<Signer>,
    pub(crate) fixed: HeaderMap,
    pub(crate) source: String,
}

impl Template {
    /// Makes the headers and the body of one request, or returns why there can be none.
    pub(crate) fn fill(&self, delivery: &Delivery, now: Timestamp) -> Result<(HeaderMap, Bytes), Outcome> {
        let event = &delivery.event;
        let wrapped = self.envelope.wrap(event, &self.source)?;
        let mut headers = HeaderMap::with_capacity(16 + event.headers.len());
        let mut own = Vec::with_capacity(event.headers.len());
        for (name, value) in delivery.headers() {
            let name = HeaderName::try_from(name).map_err(|_| invalid(name))?;
            let spelled = hyphenated(name.as_str());
            let is_fixed = || self.fixed.keys().any(|fixed| hyphenated(fixed.as_str()) == spelled);
            if is_ours(&spelled) || is_of_one_request(&spelled) || is_fixed() {
                continue;
            }
            if own.contains(&name) {
                let text = format!("the event has the header {name} twice, in different case; HTTP has one");
                return Err(Outcome::dead("header_duplicate", text));
            }
            own.push(name.clone());
            headers.insert(name.clone(), value_of(name.as_str(), value.to_owned())?);
        }
        headers.extend(self.fixed.clone());
        headers.insert(header::CONTENT_TYPE, value_of("content-type", wrapped.content_type.clone().into_owned())?);
        for (name, value) in Binding::HTTP.spell(&wrapped) {
            let value = value_of(&name, value.into_owned())?;
            headers.insert(HeaderName::try_from(&name).map_err(|_| invalid(&name))?, value);
        }
        self.sign(&mut headers, &delivery.dedupe_id(), &wrapped.body, now)?;
        Ok((headers, wrapped.body))
    }

    fn sign(&self, headers: &mut HeaderMap, id: &str, body: &[u8], now: Timestamp) -> Result<(), Outcome> {
        let Some(signer) = &self.signer else {
            headers.insert(ID_HEADER, value_of(ID_HEADER, id.to_owned())?);
            headers.insert(TIMESTAMP_HEADER, HeaderValue::from(now.as_second()));
            return Ok(());
        };
        // The clock is wrong, which is not the event's fault: try again.
        let signed = signer
            .sign(id, UnixSeconds(now.as_second()), body)
            .map_err(|error| Outcome::retry("sign_failed", error.to_string()))?;
        for (name, value) in signed.headers() {
            headers.insert(HeaderName::from_static(name), value_of(name, value.to_owned())?);
        }
        Ok(())
    }
}

/// Makes a header value; text beyond ASCII is sent as UTF-8.
fn value_of(name: &str, value: String) -> Result<HeaderValue, Outcome> {
    HeaderValue::from_maybe_shared(Bytes::from(value)).map_err(|_| invalid(name))
}

fn invalid(name: &str) -> Outcome {
    let name: String = name.escape_debug().take(100).collect();
    Outcome::dead("header_invalid", format!("the event's header \"{name}\" has a name or value that HTTP cannot carry"))
}
