//! Dead letters: dead events on their way to a second sink.

use std::time::Duration;

use async_trait::async_trait;

use crate::batch::{BatchLimit, Delivery, Unreadable};
use crate::error::Result;
use crate::event::{EventId, Headers, Seq, check_headers, header};
use crate::limits::MESSAGE_ID_BYTES_MAX;
use crate::log::Lease;
use crate::names::SubscriptionName;

/// Names of the headers that a dead letter has in addition to the event's own.
pub mod dead_header {
    /// The id of the dead event. The letter has a different one.
    pub const ID: &str = "postbox-dead-id";
    /// The code of the last failure, e.g. `http_422`.
    pub const CODE: &str = "postbox-dead-code";
    /// The text of the last failure.
    pub const REASON: &str = "postbox-dead-reason";
    /// The number of counted attempts.
    pub const ATTEMPTS: &str = "postbox-dead-attempts";
    /// The subscription in which the event is dead.
    pub const SUBSCRIPTION: &str = "postbox-dead-subscription";
    /// The log that the event is in.
    pub const LOG: &str = "postbox-dead-log";
    /// How many of the event's own headers were left out, because with these ones they would exceed
    /// the limits of an event. Absent means none.
    pub const LEFT_OUT: &str = "postbox-dead-left-out";

    pub(super) const ALL: [&str; 7] = [ID, CODE, REASON, ATTEMPTS, SUBSCRIPTION, LOG, LEFT_OUT];
}

/// How many bytes at the end of an id differ between a letter and its event.
const DEATH_BYTES: usize = 7;
/// Longest reason in a letter, in bytes. Fits into a header under common limits.
const REASON_BYTES_MAX: usize = 512;

/// A dead event that has not been handed over yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetter {
    /// The event as it is in the log. `attempt` is the number of counted attempts. `replay`
    /// separates this death from earlier ones.
    pub delivery: Delivery,
    /// Why there is nothing to hand over, if the event cannot be read.
    pub unreadable: Option<Unreadable>,
    /// Why it is dead.
    pub code: String,
    /// The text of the last failure.
    pub error: String,
}

impl DeadLetter {
    /// Returns the letter to send: the original with the reason in its headers, under an id for
    /// this death.
    ///
    /// A broker that has seen the event, or the letter of another subscription, must not take this
    /// letter for a repetition. The same death always gives the same id, so that a letter sent
    /// twice can be recognised.
    pub fn into_delivery(self, lease: &Lease) -> Delivery {
        let Self { mut delivery, code, error, .. } = self;
        // Some brokers refuse headers that end with white space or contain control characters or
        // noncharacters.
        let shown = |c: char| if c.is_control() || is_noncharacter(c) { ' ' } else { c };
        let reason: String = error[..error.floor_char_boundary(REASON_BYTES_MAX)].chars().map(shown).collect();
        let headers = [
            (dead_header::ID, delivery.event.id.to_string()),
            (dead_header::CODE, code),
            (dead_header::REASON, reason.trim().to_owned()),
            (dead_header::ATTEMPTS, delivery.attempt.to_string()),
            (dead_header::SUBSCRIPTION, lease.subscription.to_string()),
            (dead_header::LOG, lease.log.to_string()),
        ];
        // The letter itself can be decoded: whoever receives it must not take it for poison.
        delivery.event.headers.remove(header::POISON);
        delivery.event.headers.extend(headers.map(|(name, value)| (name.to_owned(), value)));
        leave_out(&mut delivery.event.headers);
        // Its end was that of the event: whoever looks after what died wants to have it.
        delivery.event.expires_at = None;
        delivery.event.id = letter_id(delivery.event.id, &lease.subscription, delivery.replay);
        Delivery { attempt: 1, replay: 0, ..delivery }
    }
}

/// Leaves out headers of the event, the last one first, until a log would take the letter.
fn leave_out(headers: &mut Headers) {
    let mut left_out: u32 = headers.get(dead_header::LEFT_OUT).and_then(|count| count.parse().ok()).unwrap_or(0);
    while check_headers(headers).is_err_and(|error| error.code().starts_with("headers_too_")) {
        // The id that an inbox noted counts towards no limit, and ends rings of letters.
        let is_note = |name: &str, value: &str| name == header::MESSAGE_ID && value.len() <= MESSAGE_ID_BYTES_MAX;
        let is_own = |name: &str, value: &str| !dead_header::ALL.contains(&name) && !is_note(name, value);
        let Some((name, _)) = headers.iter().rfind(|(name, value)| is_own(name, value)) else { break };
        let name = name.clone();
        headers.remove(&name);
        left_out = left_out.saturating_add(1);
        headers.insert(dead_header::LEFT_OUT.to_owned(), left_out.to_string());
    }
}

/// Returns whether Unicode reserves the character for internal use (Unicode 16, §23.7).
fn is_noncharacter(c: char) -> bool {
    matches!(u32::from(c), 0xFDD0..=0xFDEF) || u32::from(c) & 0xFFFE == 0xFFFE
}

/// Identifies the death that a letter is about, in 14 digits: different in each subscription and
/// after each replay. `None` if it is no letter, but perhaps an event that was one in another log.
pub fn death_of(delivery: &Delivery) -> Option<String> {
    let of: EventId = delivery.event.header(dead_header::ID)?.parse().ok()?;
    let (id, of) = (delivery.event.id.as_uuid(), of.as_uuid());
    let (id, of) = (id.as_bytes(), of.as_bytes());
    // The version bits are not compared.
    let is_letter = id[6] >> 4 == 8 && id[..6] == of[..6] && id[7..9] == of[7..9];
    let bytes = id.iter().zip(of).skip(id.len() - DEATH_BYTES);
    is_letter.then(|| bytes.map(|(byte, of)| format!("{:02x}", byte ^ of)).collect())
}

/// Returns whether a text can be what [`death_of`] returns. No group of a UUID is as long.
pub fn is_death(text: &str) -> bool {
    text.len() == 2 * DEATH_BYTES && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// A UUID (version 8) for one death: the event's, with 56 of its bits changed by a hash of
/// subscription and replay. Within a subscription, no two events get the same one.
fn letter_id(id: EventId, subscription: &SubscriptionName, replay: u32) -> EventId {
    // FNV-1a suffices, because the hash protects no secret.
    let mut mark: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in subscription.as_str().bytes().chain([0]).chain(replay.to_be_bytes()) {
        mark = (mark ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    let mut bytes = id.as_uuid().into_bytes();
    bytes[16 - DEATH_BYTES..].iter_mut().zip(mark.to_be_bytes()).for_each(|(byte, mark)| *byte ^= mark);
    bytes[6] = 0x80 | (bytes[6] & 0x0f);
    EventId::from_uuid(uuid::Uuid::from_bytes(bytes))
}

/// The result of handing over one dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handover {
    /// The position of its event.
    pub seq: Seq,
    /// The death it is about: [`Delivery::replay`] as it was read.
    pub replay: u32,
    /// `None` if it is finished. Otherwise the letter comes again after this wait.
    pub again: Option<Duration>,
}

/// The dead events of a leased lane that have not been handed to a dead-letter sink yet.
///
/// Behaviour, checked for every store by the conformance suite:
/// - Every dead event is a letter until it is handed over, even if there was no dead-letter sink
///   when it died.
/// - A replay or a discard withdraws the letter. An event that dies again is a letter again,
///   whatever happened to the previous one.
/// - `hand_over` applies to one death. If it is repeated or late, or if the event was replayed or
///   discarded meanwhile, it changes nothing else. It never changes whether an event is dead.
/// - Without the lease, both methods return `Stale` and change nothing.
#[async_trait]
pub trait DeadLetters: Send + Sync + 'static {
    /// Returns letters of the lane that are due, longest waiting first; at least one if there is
    /// any.
    async fn dead_letters(&self, lease: &Lease, limit: BatchLimit) -> Result<Vec<DeadLetter>>;

    /// Records the results for letters.
    async fn hand_over(&self, lease: &Lease, handovers: &[Handover]) -> Result<()>;
}

const _: Option<&dyn DeadLetters> = None;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Event, NewEvent};
    use crate::limits::{HEADER_BYTES_MAX, HEADERS_MAX};
    use crate::names::{LogName, OwnerId};

    fn lease(subscription: &str) -> Lease {
        Lease {
            subscription: SubscriptionName::new(subscription).expect("a name"),
            log: LogName::outbox(),
            lane: 0,
            epoch: 1,
            owner: OwnerId::new("one").expect("a name"),
            crashes: 0,
        }
    }

    fn letter(error: &str, replay: u32) -> DeadLetter {
        let id = "01890000-0000-7000-8000-000000000001".parse().expect("an id");
        let event = NewEvent::json("t", "{}").key("k").header("h", "v").header(dead_header::CODE, "of a former life");
        let event = event.header(header::POISON, "json_invalid: line 1").into_event(id, jiff::Timestamp::UNIX_EPOCH);
        let delivery = Delivery { event, seq: Seq(7), attempt: 10, replay, trace: None };
        DeadLetter { delivery, unreadable: None, code: "http_422".into(), error: error.into() }
    }

    #[test]
    fn a_letter_is_the_original_and_says_why() {
        let mut original = letter("no\r\nway", 1);
        original.delivery.event.expires_at = Some(jiff::Timestamp::UNIX_EPOCH);
        let sent = original.clone().into_delivery(&lease("hooks"));
        assert_eq!(sent.event.expires_at, None, "a letter has no end");
        let headers: Vec<_> = sent.event.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(
            headers,
            [
                ("h", "v"),
                ("postbox-dead-attempts", "10"),
                ("postbox-dead-code", "http_422"),
                ("postbox-dead-id", "01890000-0000-7000-8000-000000000001"),
                ("postbox-dead-log", "outbox"),
                ("postbox-dead-reason", "no  way"),
                ("postbox-dead-subscription", "hooks"),
            ]
        );
        assert_eq!(
            (&sent.event.payload, &sent.event.key),
            (&original.delivery.event.payload, &original.delivery.event.key)
        );
        let spaced = letter("no\u{fffe} \n", 0).into_delivery(&lease("hooks"));
        assert_eq!(spaced.event.headers[dead_header::REASON], "no");
        let long = letter(&"€".repeat(400), 0).into_delivery(&lease("hooks"));
        assert_eq!(long.event.headers[dead_header::REASON].len(), 510);
    }

    #[test]
    fn a_death_is_known_from_others_of_its_event() {
        let death = |subscription, replay| death_of(&letter("", replay).into_delivery(&lease(subscription)));
        let deaths = [death("hooks", 0), death("hooks", 1), death("other", 0)];
        assert!(deaths.iter().all(|death| death.as_deref().is_some_and(is_death)), "{deaths:?}");
        assert!(!["00000000001", "0123456789abcdef", "0123456789-abc", "0123456789ABCD"].into_iter().any(is_death));
        assert_eq!(deaths.iter().collect::<std::collections::HashSet<_>>().len(), 3, "{deaths:?}");
        let sent = letter("", 0).into_delivery(&lease("hooks"));
        let arrived = Event { id: "0190163d-8694-739b-aea5-966c26f8ad90".parse().expect("an id"), ..sent.event };
        assert_eq!(death_of(&Delivery { event: arrived, ..letter("", 0).delivery }), None);
    }

    #[test]
    fn a_letter_has_no_more_headers_than_an_event_may_have() {
        let sent = |own: Headers| {
            let mut letter = letter(&"x".repeat(600), 0);
            letter.delivery.event.headers = own;
            let headers = letter.into_delivery(&lease("hooks")).event.headers;
            check_headers(&headers).expect("a log takes them");
            assert_eq!(headers[dead_header::REASON].len(), REASON_BYTES_MAX);
            assert!([dead_header::ID, dead_header::CODE, dead_header::LOG].iter().all(|it| headers.contains_key(*it)));
            headers
        };
        let own = |count: usize, bytes: usize| -> Headers {
            let note = (header::MESSAGE_ID.to_owned(), "i".repeat(MESSAGE_ID_BYTES_MAX));
            (0..count).map(|n| (format!("h{n:02}"), "v".repeat(bytes))).chain([note]).collect()
        };
        assert!(!sent(own(HEADERS_MAX - 6, 1)).contains_key(dead_header::LEFT_OUT));
        for full in [own(HEADERS_MAX, 1), own(HEADERS_MAX, HEADER_BYTES_MAX / HEADERS_MAX - 3)] {
            let headers = sent(full);
            let left_out: usize = headers[dead_header::LEFT_OUT].parse().expect("a number");
            assert!(left_out >= 7 && headers.contains_key(header::MESSAGE_ID), "{headers:?}");
            let has = |n: usize| headers.contains_key(&format!("h{n:02}"));
            assert!(has(HEADERS_MAX - left_out - 1) && !has(HEADERS_MAX - left_out), "{headers:?}");
            assert_eq!(sent(headers.clone()), headers, "a letter that dies again has room");
        }
        let one = [("a".to_owned(), "v".to_owned()), ("z".to_owned(), "v".repeat(HEADER_BYTES_MAX - 3))];
        let headers = sent(one.into());
        assert!(headers.contains_key("a") && !headers.contains_key("z") && headers[dead_header::LEFT_OUT] == "1");
    }

    #[test]
    fn each_death_has_an_id_of_its_own_and_always_the_same() {
        let id = |subscription, replay| letter("", replay).into_delivery(&lease(subscription)).dedupe_id();
        assert_eq!(id("hooks", 0), id("hooks", 0));
        let mut ids = vec![letter("", 0).delivery.dedupe_id(), id("hooks", 0), id("hooks", 1), id("other", 0)];
        assert!(ids.iter().skip(1).all(|id| id.starts_with("01890000-0000-8000-8")), "{ids:?}");
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 4);
    }
}
