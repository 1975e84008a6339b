//! One request, from the first byte to the answer.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::extract::{Path, Request, State};
use http::request::Parts;
use postbox_core::{ErrorKind, Inbound, Received};
use postbox_engine::Receiver;
use postbox_webhook::{Headers, Refusal, UnixSeconds, Verified};
use tracing::{debug, warn};

use crate::answer::Answer;
use crate::body::{check_headers, read};
use crate::handshake::challenge;
use crate::ingress::{Ingress, SourceState};
use crate::mapping::{Rejection, VerifiedRequest};
use crate::source::Check;

/// Longest time for the body of a message whose own headers say that it is out of time.
const STALE_TIMEOUT: Duration = Duration::from_secs(1);

/// The handler.
///
/// Cancel-safety: dropped because the sender hung up, the message may or may not be stored; its
/// repetition is a duplicate then.
pub(crate) async fn receive(State(ingress): State<Arc<Ingress>>, Path(name): Path<String>, request: Request) -> Answer {
    let Some(state) = ingress.sources.get(&name) else {
        ingress.unknown.count(&Answer::UnknownSource);
        return Answer::UnknownSource;
    };
    let (parts, body) = request.into_parts();
    let answer = match ingress.answer(state, &parts, body).await {
        Ok(answer) | Err(answer) => answer,
    };
    state.counters.count(&answer);
    ingress.observe(state, &answer);
    debug!(source = %state.source.name, answer = answer.code(), "webhook received");
    answer
}

impl Ingress {
    /// Notes what the receiver does not see: replays known by their age, and bodies that do not
    /// end.
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

    /// What the sender of a verified message hears that is no event. Each is lost if nobody mends
    /// the mapping in time, so each is logged; but whoever captured one can send it all day, so no
    /// more than so many a minute.
    fn answer_to(&self, state: &SourceState, rejection: &Rejection) -> Answer {
        match rejection {
            Rejection::Answered(answer) => answer.clone(),
            Rejection::Mapping(failure) => {
                if state.logging().unmapped.take(self.clock.monotonic()).is_ok() {
                    failure.log(&state.source.name);
                }
                failure.answer()
            }
        }
    }

    /// Keeps the source to its rate.
    fn pace(&self, state: &SourceState) -> Result<(), Answer> {
        let Some(rate) = &state.rate else { return Ok(()) };
        let mut bucket = rate.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.take(self.clock.monotonic()).map_err(Answer::TooMany)
    }

    /// Checks the headers before anything of the body is read; how long the body may take then.
    /// Anybody can write headers, so this keeps out only who does not know what to write; SNS signs
    /// nothing there.
    fn check_head(&self, state: &SourceState, head: &postbox_webhook::Request<'_>) -> Result<Duration, Answer> {
        let timeout = state.source.limits.body_timeout;
        let Check::Keys(verifier) = &state.source.check else { return Ok(timeout) };
        match verifier.check_head(head, self.now()) {
            Ok(()) => Ok(timeout),
            // A time alone says nothing. Of a verified message it says that somebody repeats it or
            // that a clock is off, so the body is read; but it is not waited for long.
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
            // Anybody can cause these as often as they like: a mismatch with nothing at hand, a
            // stale time with one captured message. All are counted; of the stale ones, which may
            // mean that a clock is off, one in ten minutes is logged.
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
        match state.receiver.receive(inbound).await {
            Ok(Received::Accepted(_)) => Ok(Answer::Accepted),
            Ok(Received::Duplicate) => Ok(Answer::Duplicate),
            Ok(Received::Conflict) => Ok(Answer::Conflict),
            // Not waited for: a sender that is asked to come again soon is better off than one in a
            // queue it cannot see.
            Err(failure) if failure.code() == Receiver::BUSY => Err(Answer::Busy),
            Err(failure) if failure.kind() == ErrorKind::Invalid => Err(Answer::Unmapped("event_invalid")),
            // Also a wrong log or schema: somebody can mend it, and the sender's repetition then
            // succeeds.
            Err(_) => Err(Answer::StoreDown),
        }
    }
}
