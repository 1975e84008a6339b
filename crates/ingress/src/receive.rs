//! One request, from the first byte to the answer.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::extract::{Path, Request, State};
use http::request::Parts;
use postbox_core::{Error, ErrorKind, Inbound, Received};
use postbox_webhook::{Headers, Refusal, UnixSeconds, Verified};
use tracing::{debug, error, warn};

use crate::answer::Answer;
use crate::body::{check_headers, read};
use crate::handshake::challenge;
use crate::ingress::{Gate, Ingress};
use crate::mapping::{Genuine, Unfit, shown};
use crate::source::Check;

/// Longest time for the body of a message whose own headers say that it is out of time.
const STALE_TIMEOUT: Duration = Duration::from_secs(1);

/// The handler. Dropping it (the sender hung up) may or may not have stored the message; the sender's repetition is a duplicate then.
pub(crate) async fn receive(State(ingress): State<Arc<Ingress>>, Path(name): Path<String>, request: Request) -> Answer {
    let Some(gate) = ingress.gates.get(&name) else {
        ingress.unknown.count(&Answer::UnknownSource);
        return Answer::UnknownSource;
    };
    let (parts, body) = request.into_parts();
    let answer = match ingress.pass(gate, &parts, body).await {
        Ok(answer) | Err(answer) => answer,
    };
    gate.counters.count(&answer);
    ingress.watch(gate, &answer);
    debug!(source = %gate.source.name, answer = answer.code(), "webhook received");
    answer
}

impl Ingress {
    /// Warns of a source that repeats itself, or whose bodies do not end.
    fn watch(&self, gate: &Gate, answer: &Answer) {
        let repeat = match answer {
            Answer::Accepted | Answer::Conflict => false,
            Answer::Duplicate => true,
            Answer::Refused(refusal) if refusal.is_stale() => *refusal == Refusal::TooOld,
            Answer::BodyPushedOut => {
                if let Some(times) = gate.storm().tells_of_pushed_out(self.clock.monotonic()) {
                    warn!(
                        source = %gate.source.name, code = answer.code(), times,
                        "the bodies of one source were too much together; those that began first and had not ended were sent away"
                    );
                }
                return;
            }
            _ => return,
        };
        let warning = gate.storm().observe(self.clock.monotonic(), repeat);
        if let Some(warning) = warning {
            warn!(
                source = %gate.source.name, repeats = warning.repeats, arrivals = warning.arrivals,
                "replay storm: most of what came within a minute had come before; it is kept out"
            );
        }
    }

    async fn pass(&self, gate: &Gate, parts: &Parts, body: axum::body::Body) -> Result<Answer, Answer> {
        let source = &gate.source;
        check_headers(&parts.headers, &source.limits)?;
        let headers: Headers<'_> =
            parts.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        let head = postbox_webhook::Request { headers: &headers, query: parts.uri.query(), body: b"" };
        let timeout = self.check_head(gate, &head)?;
        let mut share = gate.buffer.share();
        let pushed_out = share.pushed_out();
        let verify = async {
            let body = read(body, source.limits.body_bytes, &mut share, &*self.clock, timeout).await?;
            let verified = self.verify(gate, &head, &body).await?;
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
        let genuine = Genuine { headers: &parts.headers, body, verified };
        let inbound = genuine.into_inbound(source).map_err(|unfit| self.answer_to(gate, &unfit))?;
        self.pace(gate)?;
        // Not waited for: a sender that is told to come again soon is better off than one that waits in a queue it cannot see.
        let _place = gate.storing.try_acquire().map_err(|_| Answer::Busy)?;
        self.store(gate, inbound).await
    }

    /// What the sender of a genuine message hears that is no event. Each is lost if nobody mends the mapping in time, so each is told; but as whoever has
    /// captured one can send it all day, so many a minute and no more.
    fn answer_to(&self, gate: &Gate, unfit: &Unfit) -> Answer {
        match unfit {
            Unfit::Told(answer) => answer.clone(),
            Unfit::Untold(unmapped) => {
                let mut told = gate.unmapped_told.lock().unwrap_or_else(PoisonError::into_inner);
                if told.take(self.clock.monotonic()).is_ok() {
                    unmapped.tell(&gate.source.name);
                }
                unmapped.answer()
            }
        }
    }

    /// Keeps the source to its rate.
    fn pace(&self, gate: &Gate) -> Result<(), Answer> {
        let Some(rate) = &gate.rate else { return Ok(()) };
        let mut bucket = rate.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.take(self.clock.monotonic()).map_err(Answer::TooMany)
    }

    /// What the headers say before anything of the body is read, and how long that may take then. Anybody can write headers, so this keeps out only who
    /// does not know what to write; SNS signs nothing there.
    fn check_head(&self, gate: &Gate, head: &postbox_webhook::Request<'_>) -> Result<Duration, Answer> {
        let timeout = gate.source.limits.body_timeout;
        let Check::Keys(verifier) = &gate.source.check else { return Ok(timeout) };
        match verifier.check_head(head, self.now()) {
            Ok(()) => Ok(timeout),
            // A time alone says nothing. Only of a genuine message it tells that somebody repeats it or that a clock is off, so that is found out; but it
            // is not waited for.
            Err(refusal) if refusal.is_stale() => Ok(timeout.min(STALE_TIMEOUT)),
            Err(refusal) => {
                debug!(source = %gate.source.name, code = refusal.code(), "webhook refused: {refusal}");
                Err(Answer::Refused(refusal))
            }
        }
    }

    async fn verify(&self, gate: &Gate, head: &postbox_webhook::Request<'_>, body: &[u8]) -> Result<Verified, Answer> {
        let verified = match &gate.source.check {
            Check::Keys(verifier) => {
                let request = postbox_webhook::Request { body, ..*head };
                verifier.verify(&request, self.now()).map_err(Answer::Refused)
            }
            Check::Sns(sns) => sns.check(body, &self.clock).await,
        };
        if let Err(Answer::Refused(refusal)) = &verified {
            // Anybody can cause these as often as they like: a mismatch with nothing at hand, a stale time with one captured message. All
            // are counted; of the stale ones, which may mean that a clock is off, one in a while is told.
            match refusal.is_stale() && gate.storm().tells_of_stale(self.clock.monotonic()) {
                true => warn!(source = %gate.source.name, code = refusal.code(), "webhook refused: {refusal}"),
                false => debug!(source = %gate.source.name, code = refusal.code(), "webhook refused: {refusal}"),
            }
        }
        verified
    }

    fn now(&self) -> UnixSeconds {
        UnixSeconds(self.clock.now().as_second())
    }

    async fn store(&self, gate: &Gate, inbound: Inbound) -> Result<Answer, Answer> {
        let source = &gate.source;
        let message_id = inbound.message_id.clone();
        match gate.gather.store(inbound).await {
            Ok(Received::Accepted(_)) => Ok(Answer::Accepted),
            Ok(Received::Duplicate) => Ok(Answer::Duplicate),
            Ok(Received::Conflict) => {
                // Whoever can sign makes as many as he likes.
                if let Some(conflicts) = gate.storm().tells_of_conflict(self.clock.monotonic()) {
                    let message_id = shown(&message_id);
                    warn!(source = %source.name, message_id, conflicts, "a webhook came with a known id and another body; kept out");
                }
                Ok(Answer::Conflict)
            }
            Err(failure) => Err(blame(gate, &message_id, &failure)),
        }
    }
}

fn blame(gate: &Gate, message_id: &str, failure: &Error) -> Answer {
    let (source, code) = (&gate.source.name, failure.code());
    match failure.kind() {
        ErrorKind::Invalid => {
            let message_id = shown(message_id);
            warn!(%source, code, message_id, "a genuine webhook was refused by the store: {failure}");
            Answer::Unmapped("event_invalid")
        }
        ErrorKind::Unavailable | ErrorKind::RateLimited => {
            warn!(%source, code, "the store is not available; the sender was told to come again: {failure}");
            Answer::StoreDown
        }
        // A wrong log, a wrong schema: the owner can mend it, and the sender's repetition then succeeds.
        _ => {
            error!(%source, code, "the store failed; the sender was told to come again: {failure}");
            Answer::StoreDown
        }
    }
}
