//! What providers ask before they send: is this URL yours, and do you want this?

use std::sync::Arc;

use axum::extract::{Path, State};
use http::HeaderMap;
use postbox_webhook::Scheme;
use tracing::debug;

use crate::answer::Answer;
use crate::ingress::{Ingress, SourceState};
use crate::json::text_at;

/// Slack asks once whether the URL is ours. Only a verified question is answered.
pub(crate) fn challenge(scheme: Scheme, body: &[u8]) -> Option<String> {
    let asked = scheme == Scheme::Slack && text_at(body, "/type")? == "url_verification";
    asked.then(|| text_at(body, "/challenge"))?
}

/// CloudEvents asks by `OPTIONS` whether an origin may send here. Nobody can sign this question, so
/// only names that the configuration knows are answered; a callback URL in it is never called.
pub(crate) async fn consent(
    State(ingress): State<Arc<Ingress>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Answer {
    let Some(state) = ingress.sources.get(&name) else {
        ingress.unknown.count(&Answer::UnknownSource);
        return Answer::UnknownSource;
    };
    let answer = state.consent_to(&headers);
    state.counters.count(&answer);
    // At debug: nobody can sign this question, so anybody can ask it all day.
    debug!(source = %state.source.name, answer = answer.code(), "CloudEvents consent requested");
    answer
}

impl SourceState {
    fn consent_to(&self, headers: &HeaderMap) -> Answer {
        let mut asking = headers.get_all("webhook-request-origin").iter();
        // Two origins in one question are none.
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
