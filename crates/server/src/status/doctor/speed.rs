//! Why events wait although nothing is down: compares the arrival rate with the delivery rate.

use std::collections::HashSet;
use std::time::Duration;

use postbox_core::{Disposition, Ordering, Record};

use super::Finding;
use super::asked::{Known, is_driven};
use crate::status::CallsJson;
use crate::text::{cut, estimated, grouped, span};

/// Events that are pending for longer than this are late.
pub(super) const LATE: Duration = Duration::from_secs(10);
/// Before any call has ended, calls in flight count as slow from this age.
const SAYS_SOMETHING: Duration = Duration::from_secs(1);
/// The largest value that the cure may suggest for `concurrency`: the configuration's limit.
const CONCURRENCY_MAX: f64 = 512.0;
/// If at least this share of the allowed calls is in use, concurrency is the bottleneck.
const MOST: f64 = 0.7;
/// Headroom of a suggested rate or concurrency above the arrival rate, for busier hours.
const ROOM: f64 = 1.25;

/// Returns what limits the delivery rate, if events are late although they go out.
pub(super) fn speed(known: &Known<'_>) -> Option<Finding> {
    let calls = known.work?.calls.as_ref()?;
    // Calls that have just begun are no evidence yet.
    let is_known = calls.ended > 0 || calls.seconds_each > SAYS_SOMETHING.as_secs_f64();
    // Events that wait for a retry are not held up by the delivery speed.
    let waits = known.unread() > 0 || known.retrying.iter().any(is_under_way);
    if !is_known || !is_late(known) || !waits {
        return None;
    }
    let arrive = known.arrivals.as_ref().map(|it| it.per_second);
    let each = match calls.ended {
        0 => format!("each call takes {} and more", span(Duration::from_secs_f64(calls.seconds_each))),
        _ => format!("each call takes {}", span(Duration::from_secs_f64(calls.seconds_each))),
    };
    if let (true, Some(rate), Some(per_second)) = (calls.held_by_rate, &calls.rate, calls.rate_per_second) {
        let named = known.config.and_then(|config| config.rate_of.as_ref());
        if calls.rate_shared || named.is_some() {
            // The arrivals are those of this subscription, the rate is that of all.
            let how = format!("rate = \"{rate}\", shared with others");
            let cure = format!(
                "raise the `rate` of {}, if the destination can take it, or wait",
                named.unwrap_or(&known.info.name)
            );
            let flow = Flow { takes: per_second, arrive: None, share: 1.0 };
            return Some(finding("rate_limited", known, &how, flow, cure));
        }
        let how = format!("rate = \"{rate}\" allows {}", a_second(per_second));
        let cure = match arrive.filter(|arrive| *arrive >= per_second) {
            None => "raise the subscription's `rate`, if the destination can take it, or wait".to_owned(),
            Some(arrive) => {
                let needed = (arrive * ROOM).ceil();
                format!(
                    "raise the subscription's `rate` to \"{needed}/s\" or remove it, if the destination can take it"
                )
            }
        };
        return Some(finding("rate_limited", known, &how, Flow { takes: per_second, arrive, share: 1.0 }, cure));
    }
    if let Some((key, share)) = one_key(known, calls) {
        let (takes, arrive) = (1.0 / calls.seconds_each.max(1e-6), arrive.map(|arrive| arrive * share));
        let how = format!("{key}, and are delivered one after the other: {each} = {}", a_second(takes));
        let cure = "give the events finer keys, set ordering = \"none\" if their order does not matter, or make the destination faster";
        return Some(finding("few_keys", known, &how, Flow { takes, arrive, share }, cure.to_owned()));
    }
    if calls.at_once < calls.at_once_max as f64 * MOST {
        return None;
    }
    let takes = calls.events_per_second(calls.at_once_max as f64);
    let mut how = format!("the destination is slow: {each}, {} at once = {}", calls.at_once_max, a_second(takes));
    let driven = known.info.lanes.iter().filter(|lane| is_driven(lane));
    let relays = driven.filter_map(|lane| lane.owner.as_ref()).collect::<HashSet<_>>().len();
    if relays > 1 {
        // The arrivals are those of all relays, the calls those of this service.
        how = format!("{how} by this one of {relays} relays");
    }
    let arrive = arrive.filter(|_| relays <= 1);
    Some(finding("destination_slow", known, &how, Flow { takes, arrive, share: 1.0 }, faster(calls, takes, arrive)))
}

/// Whether the oldest pending event is late.
pub(super) fn is_late(known: &Known<'_>) -> bool {
    known.stats.pending > 0 && known.stats.oldest_pending.is_none_or(|age| age > LATE)
}

/// Events per second: what the destination takes, and what arrives.
#[derive(Clone, Copy)]
struct Flow {
    takes: f64,
    /// `None`: unknown.
    arrive: Option<f64>,
    /// The part of all waiting events that this is about.
    share: f64,
}

/// A backlog that shrinks is a note, one that grows is a problem.
fn finding(code: &str, known: &Known<'_>, how: &str, flow: Flow, cure: String) -> Finding {
    let Flow { takes, arrive, share } = flow;
    let pending = estimated(known.stats.pending, known.stats.is_estimate);
    let Some(arrive) = arrive else {
        return Finding::note(code, format!("{how}; {pending} wait")).cure(cure);
    };
    let message = format!("{how}, {} arrive; {pending} wait", a_second(arrive));
    if takes > arrive {
        let drained = Duration::from_secs_f64((known.stats.pending as f64 * share / (takes - arrive)).min(1e9));
        return Finding::note(code, format!("{message}, drained in {}", span(drained))).cure(cure);
    }
    Finding::problem(code, format!("{message}, and the backlog grows"), cure)
}

/// The key that most events have, and its share of them, if events of one key go out one at a time.
fn one_key(known: &Known<'_>, calls: &CallsJson) -> Option<(String, f64)> {
    if known.info.ordering != Ordering::Key || calls.at_once_max == 1 {
        return None;
    }
    let arrivals = known.arrivals.as_ref();
    if let Some((Some((key, count)), of)) = arrivals.map(|it| (it.key.as_ref(), it.of))
        && *count > 1
        && count * 2 > of
    {
        return Some((
            format!("{count} of the last {of} events have the key {}", cut(key, 60)),
            *count as f64 / of as f64,
        ));
    }
    // Nothing arrived lately: take the key that blocked events share with an event in flight.
    let mut keys = known.retrying.iter().filter(|it| is_under_way(it)).filter_map(|it| it.event.key.as_ref());
    let key = keys.find(|key| known.blocked.iter().all(|it| it.event.key.as_ref() == Some(key)))?;
    (!known.blocked.is_empty()).then(|| (format!("the waiting events have the key {}", cut(key.as_str(), 60)), 1.0))
}

fn is_under_way(record: &Record) -> bool {
    record.code.as_deref() == Some(Disposition::IN_FLIGHT)
}

fn faster(calls: &CallsJson, takes: f64, arrive: Option<f64>) -> String {
    let arrive = arrive.unwrap_or_default();
    let needed = (calls.at_once_max as f64 * arrive * ROOM / takes.max(1e-6)).ceil();
    match () {
        // One call at a time, in order: no setting to raise.
        () if calls.at_once_max == 1 && calls.events_each > 1.0 => "make the destination faster".to_owned(),
        () if takes > arrive => {
            "wait, or raise the subscription's `concurrency` if the destination can take it".to_owned()
        }
        () if needed > CONCURRENCY_MAX => format!(
            "make the destination faster: at this rate of arrival, {} concurrent calls would be needed",
            grouped(needed as u64)
        ),
        () => {
            format!("set concurrency = {needed} in the subscription, if the destination can take it; or make it faster")
        }
    }
}

fn a_second(number: f64) -> String {
    match number {
        0.0 => "0/s".to_owned(),
        ..10.0 => format!("{number:.1}/s"),
        _ => format!("{}/s", grouped(number.round() as u64)),
    }
}

#[cfg(test)]
mod tests {
    use postbox_core::{Filter, LaneInfo, LogName, OwnerId, Stats, SubscriptionInfo};

    use super::*;
    use crate::config::{Config, SubscriptionConfig};
    use crate::status::doctor::asked::Arrivals;
    use crate::status::{StatsJson, WorkJson};

    /// Two calls at once, of 125 ms and one event each: 16/s.
    fn calls() -> CallsJson {
        CallsJson {
            ended: 100,
            events_each: 1.0,
            seconds_each: 0.125,
            at_once: 2.0,
            at_once_max: 2,
            in_flight: 2,
            rate: None,
            rate_per_second: None,
            held_by_rate: false,
            rate_shared: false,
        }
    }

    /// What is said of 2,000 late events if so many arrive per second, and so many of the last
    /// 1,000 have one key.
    fn said(calls: CallsJson, per_second: f64, of_one_key: usize) -> (String, String) {
        said_with(None, &["relay-1"], calls, per_second, of_one_key)
    }

    /// The same with this configuration, if lanes are driven by these relays.
    fn said_with(
        config: Option<&SubscriptionConfig>,
        owners: &[&str],
        calls: CallsJson,
        per_second: f64,
        of_one_key: usize,
    ) -> (String, String) {
        let lane = |owner: &&str| LaneInfo {
            lane: 0,
            epoch: 1,
            owner: Some(OwnerId::from_stored(*owner)),
            lease_left: Some(Duration::from_secs(5)),
            crashes: 0,
        };
        let info = SubscriptionInfo {
            name: "out".parse().expect("a name"),
            log: LogName::outbox(),
            filter: Filter::default(),
            ordering: Ordering::Key,
            generation: 1,
            lanes: owners.iter().map(lane).collect(),
            paused: None,
        };
        let oldest_pending = Some(Duration::from_secs(30));
        let stats = StatsJson::of(&info, Stats { pending: 2_000, total: 2_000, oldest_pending, ..Stats::default() });
        let work = WorkJson {
            store: None,
            subscription: info.name.clone(),
            calls: Some(calls),
            destination_fails: None,
            probe_in_seconds: None,
            store_fails: None,
            dead_to_fails: None,
        };
        let known = Known {
            info: &info,
            stats: &stats,
            config,
            work: Some(&work),
            fault: None,
            retrying: Vec::new(),
            blocked: Vec::new(),
            scheduled: Vec::new(),
            dead: Vec::new(),
            arrivals: Some(Arrivals { per_second, key: Some(("hot".to_owned(), of_one_key)), of: 1_000 }),
        };
        let found = speed(&known).expect("they are late");
        (found.message, found.cure.expect("a cure"))
    }

    #[test]
    fn a_slow_destination_is_calculated_from_the_calls_and_the_arrivals() {
        let (what, cure) = said(calls(), 64.0, 1);
        let slow = "the destination is slow: each call takes 125ms, 2 at once = 16/s";
        assert_eq!(what, format!("{slow}, 64/s arrive; 2,000 wait, and the backlog grows"));
        // A quarter more than 64/s.
        assert!(cure.starts_with("set concurrency = 10 in the subscription"), "{cure}");
        let (what, cure) = said(calls(), 6.0, 1);
        assert_eq!(what, format!("{slow}, 6.0/s arrive; 2,000 wait, drained in 3m 20s"));
        assert!(cure.starts_with("wait, or raise the subscription's `concurrency`"), "{cure}");
        let (_, cure) = said(calls(), 5_000.0, 1);
        assert!(cure.starts_with("make the destination faster: ") && cure.contains(" 782 concurrent calls"), "{cure}");
        let (what, _) = said(CallsJson { ended: 0, seconds_each: 2.0, ..calls() }, 6.0, 1);
        assert!(what.contains("each call takes 2.0s and more, 2 at once = 1.0/s"), "{what}");
    }

    #[test]
    fn what_other_relays_deliver_is_not_known_so_there_is_no_trend() {
        let slow = "the destination is slow: each call takes 125ms, 2 at once = 16/s";
        let (what, cure) = said_with(None, &["relay-1", "relay-2"], calls(), 64.0, 1);
        assert_eq!(what, format!("{slow} by this one of 2 relays; 2,000 wait"));
        assert!(cure.starts_with("wait, or raise the subscription's `concurrency`"), "{cure}");
        let (what, _) = said_with(None, &["relay-1", "relay-1"], calls(), 64.0, 1);
        assert!(what.ends_with("and the backlog grows"), "{what}");
    }

    #[test]
    fn a_rate_and_a_frequent_key_have_their_own_arithmetic() {
        let limited =
            CallsJson { rate: Some("5/s".to_owned()), rate_per_second: Some(5.0), held_by_rate: true, ..calls() };
        let (what, cure) = said(limited.clone(), 64.0, 1);
        assert_eq!(what, "rate = \"5/s\" allows 5.0/s, 64/s arrive; 2,000 wait, and the backlog grows");
        assert!(cure.contains("to \"80/s\""), "{cure}");
        // Fewer arrive here than the rate allows, but it is not for this subscription alone.
        let shared = "rate = \"5/s\", shared with others; 2,000 wait";
        let (what, cure) = said(CallsJson { rate_shared: true, ..limited.clone() }, 1.0, 1);
        assert_eq!((what.as_str(), cure.starts_with("raise the `rate` of out, ")), (shared, true), "{cure}");
        let group = "[subscriptions.a]\nrate = \"5/s\"\n[subscriptions.out]\nrate_of = \"a\"";
        let config = Config::parse(group).expect("no faults");
        let member = config.subscriptions.iter().find(|it| it.rate_of.is_some());
        let (what, cure) = said_with(member, &["relay-1"], limited, 1.0, 1);
        assert_eq!((what.as_str(), cure.starts_with("raise the `rate` of a, ")), (shared, true), "{cure}");
        let key = "750 of the last 1000 events have the key hot, and are delivered one after the other";
        let (what, _) = said(calls(), 64.0, 750);
        assert_eq!(
            what,
            format!("{key}: each call takes 125ms = 8.0/s, 48/s arrive; 2,000 wait, and the backlog grows")
        );
        // 1,500 of the events that wait have the key, and 2/s more of it go out than arrive.
        let (what, _) = said(calls(), 8.0, 750);
        assert!(what.ends_with("6.0/s arrive; 2,000 wait, drained in 12m 30s"), "{what}");
    }
}
