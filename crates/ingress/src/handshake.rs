//! Handshakes: providers ask whether this URL is yours, and whether they may send, before they do.

use std::sync::Arc;

use axum::extract::{Path, State};
use http::HeaderMap;
use postbox_webhook::Scheme;
use tracing::debug;

use crate::answer::Answer;
use crate::ingress::{Ingress, Named, SourceState};
use crate::json::text_at;

/// Slack asks once whether the URL belongs to us. Only a verified request is answered.
pub(crate) fn challenge(scheme: Scheme, body: &[u8]) -> Option<String> {
    let asked = scheme == Scheme::Slack && text_at(body, "/type")? == "url_verification";
    asked.then(|| text_at(body, "/challenge"))?
}

/// CloudEvents asks by `OPTIONS` whether an origin may send here. The request cannot be signed, so
/// only origins in the configuration get consent, and a callback URL in it is never called.
pub(crate) async fn consent(
    State(ingress): State<Arc<Ingress>>,
    Path(Named { source: name }): Path<Named>,
    headers: HeaderMap,
) -> Answer {
    let Some(state) = ingress.sources.get(&name) else {
        ingress.unknown.count(&Answer::UnknownSource);
        return Answer::UnknownSource;
    };
    let answer = state.consent_to(&headers);
    state.counters.count(&answer);
    // At debug, because the request cannot be signed: anybody could fill the log.
    debug!(source = %state.source.name, answer = answer.code(), "CloudEvents consent requested");
    answer
}

impl SourceState {
    fn consent_to(&self, headers: &HeaderMap) -> Answer {
        let mut asking = headers.get_all("webhook-request-origin").iter();
        // A request with two origins has none.
        let (Some(origin), None) = (asking.next(), asking.next()) else { return Answer::OriginRefused };
        let known = |known: &&String| known.as_bytes().eq_ignore_ascii_case(origin.as_bytes());
        match self.source.allowed_origins.iter().find(known) {
            Some(origin) => {
                let per_minute = self.source.limits.rate.map(postbox_core::Rate::per_minute);
                Answer::Consent { origin: origin.clone(), per_minute }
            }
            None => Answer::OriginRefused,
        }
    }
}
