//! Handles one request, from the first byte to the answer.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use postbox_core::{ErrorKind, Inbound, Received, lock};
use postbox_receiver::Receiver;
use postbox_webhook::{Headers, Refusal, UnixSeconds, Verified};
use tracing::{debug, error, warn};

use crate::answer::Answer;
use crate::body::{check_headers, read};
use crate::handshake::challenge;
use crate::ingress::{Ingress, Named, SourceState};
use crate::mapping::{Rejection, VerifiedRequest};
use crate::source::Check;

/// Time limit for the body of a message whose headers already show a stale timestamp.
const STALE_TIMEOUT: Duration = Duration::from_secs(1);

/// The handler.
///
/// Cancel-safety: if it is dropped because the sender closed the connection, the message may or may
/// not be stored. If it was, its repetition is a duplicate.
pub(crate) async fn receive(
    State(ingress): State<Arc<Ingress>>,
    Path(Named { source: name }): Path<Named>,
    request: Request,
) -> Response {
    let Some(state) = ingress.sources.get(&name) else {
        ingress.unknown.count(&Answer::UnknownSource);
        return Answer::UnknownSource.into_response();
    };
    let (parts, body) = request.into_parts();
    let answer = match ingress.answer(state, &parts, body).await {
        Ok(answer) | Err(answer) => answer,
    };
    state.counters.count(&answer);
    ingress.observe(state, &answer);
    debug!(source = %state.source.name, answer = answer.code(), "webhook received");
    answer.into_response_to(state.source.check.scheme())
}

impl Ingress {
    /// Records what the receiver does not see: replays recognised by their age, and bodies dropped
    /// from the full buffer.
    fn observe(&self, state: &SourceState, answer: &Answer) {
        match answer {
            Answer::Refused(refusal) if refusal.is_stale() => {
                state.receiver.note_arrival(*refusal == Refusal::TooOld);
            }
            Answer::BodyPushedOut => {
                if let Some(times) = state.logging().pushed_out.observe(self.clock.monotonic()) {
                    let (source, code) = (&state.source.name, answer.code());
                    warn!(%source, code, times, "body buffer full");
                }
            }
            _ => {}
        }
    }

    async fn answer(&self, state: &SourceState, parts: &Parts, body: axum::body::Body) -> Result<Answer, Answer> {
        let source = &state.source;
        check_headers(&parts.headers, &source.limits)?;
        let headers: Headers<'_> =
            parts.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        let head = postbox_webhook::Request { headers: &headers, query: parts.uri.query(), body: b"" };
        let timeout = self.check_head(state, &head)?;
        let mut share = state.buffer.share();
        let pushed_out = share.pushed_out();
        let verify = async {
            let body = read(body, source.limits.body_bytes, &mut share, &*self.clock, timeout).await?;
            let verified = self.verify(state, &head, &body).await?;
            share.keep()?;
            Ok((body, verified))
        };
        let (body, verified) = tokio::select! {
            biased;
            verified = verify => verified?,
            () = pushed_out => return Err(Answer::BodyPushedOut),
        };
        if let Some(challenge) = challenge(source.check.scheme(), &body) {
            return Ok(Answer::Challenge(challenge));
        }
        let request = VerifiedRequest { headers: &parts.headers, body, verified };
        let inbound = request.into_inbound(source).map_err(|rejection| self.answer_to(state, &rejection))?;
        self.pace(state)?;
        self.store(state, inbound).await
    }

    /// Returns the answer for a verified message that is not an event. It is lost unless the
    /// mapping is fixed in time, so it is logged. The log is rate limited, because anybody who
    /// captured one such message can send it all day.
    fn answer_to(&self, state: &SourceState, rejection: &Rejection) -> Answer {
        let (source, logs) = (&state.source.name, || state.logging().unmapped.take(self.clock.monotonic()).is_ok());
        match rejection {
            Rejection::Answered(answer) => answer.clone(),
            Rejection::NotConverted(message_id, Some(error)) => {
                if logs() {
                    warn!(%source, message_id, error, "webhook conversion failed");
                }
                Answer::Unmapped("convert_failed")
            }
            Rejection::NotConverted(message_id, None) => {
                if logs() {
                    error!(%source, message_id, "webhook conversion panicked");
                }
                Answer::ConvertPanicked
            }
            Rejection::Mapping(failure) => {
                if logs() {
                    failure.log(source);
                }
                failure.answer()
            }
        }
    }

    /// Applies the source's rate limit. Spends nothing yet, because the message may be a
    /// repetition.
    fn pace(&self, state: &SourceState) -> Result<(), Answer> {
        let Some(rate) = &state.rate else { return Ok(()) };
        let wait = lock(rate).wait(self.clock.monotonic());
        wait.map_or(Ok(()), |wait| Err(Answer::TooMany(wait)))
    }

    /// Checks the headers before any of the body is read, and returns the time limit for the body.
    /// Anybody can write plausible headers, so this rejects only careless requests. SNS signs no
    /// headers.
    fn check_head(&self, state: &SourceState, head: &postbox_webhook::Request<'_>) -> Result<Duration, Answer> {
        let timeout = state.source.limits.body_timeout;
        let Check::Keys(verifier) = &state.source.check else { return Ok(timeout) };
        match verifier.check_head(head, self.now()) {
            Ok(()) => Ok(timeout),
            // A stale timestamp alone proves nothing. On a verified message it shows a replay or a
            // wrong clock, so the body is read, but with a short time limit.
            Err(refusal) if refusal.is_stale() => Ok(timeout.min(STALE_TIMEOUT)),
            Err(refusal) => {
                debug!(source = %state.source.name, code = refusal.code(), why = %refusal, "webhook refused");
                Err(Answer::Refused(refusal))
            }
        }
    }

    async fn verify(
        &self,
        state: &SourceState,
        head: &postbox_webhook::Request<'_>,
        body: &[u8],
    ) -> Result<Verified, Answer> {
        let verified = match &state.source.check {
            Check::Keys(verifier) => {
                let request = postbox_webhook::Request { body, ..*head };
                verifier.verify(&request, self.now()).map_err(Answer::Refused)
            }
            Check::Sns(sns) => sns.check(body, &self.clock).await,
        };
        if let Err(Answer::Refused(refusal)) = &verified {
            // Anybody can cause these at will: a mismatch with no knowledge, a stale timestamp with
            // one captured message. All are counted. Stale ones may mean that a clock is wrong, so
            // one in ten minutes is logged.
            match refusal.is_stale() && state.logging().stale(self.clock.monotonic()) {
                true => warn!(source = %state.source.name, code = refusal.code(), "webhook refused: {refusal}"),
                false => debug!(source = %state.source.name, code = refusal.code(), "webhook refused: {refusal}"),
            }
        }
        verified
    }

    fn now(&self) -> UnixSeconds {
        UnixSeconds(self.clock.now().as_second())
    }

    async fn store(&self, state: &SourceState, inbound: Inbound) -> Result<Answer, Answer> {
        let Ok(_place) = self.places.try_acquire() else { return Err(Answer::Busy) };
        let received = state.receiver.receive(inbound).await;
        if let (Ok(Received::Accepted(_) | Received::Conflict), Some(rate)) = (&received, &state.rate) {
            // Repetitions cost nothing, not even while they are being stored. Otherwise whoever
            // captured one message could use up the rate of the genuine ones.
            lock(rate).spend(1, self.clock.monotonic());
        }
        match received {
            Ok(Received::Accepted(_)) => Ok(Answer::Accepted),
            Ok(Received::Duplicate) => Ok(Answer::Duplicate),
            Ok(Received::Conflict) => Ok(Answer::Conflict),
            // Refused rather than queued: an early repetition serves the sender better than a queue
            // that it cannot see.
            Err(failure) if failure.code() == Receiver::BUSY => Err(Answer::Busy),
            Err(failure) if failure.kind() == ErrorKind::Invalid => Err(Answer::Unmapped("event_invalid")),
            // Includes a wrong log or schema: once that is fixed, the sender's repetition succeeds.
            Err(_) => Err(Answer::StoreDown),
        }
    }
}
