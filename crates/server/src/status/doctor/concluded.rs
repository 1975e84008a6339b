//! Findings about one subscription: causes before symptoms.

use std::collections::BTreeSet;

use jiff::Timestamp;
use postbox_config::duration_text;
use postbox_core::{Disposition, OnDead, Pause, Record};
use postbox_engine::Schedule as _;

use super::asked::{Known, is_driven};
use super::destination::{dead, down, is_uncharged, of_all, retrying, soonest};
use super::speed::{is_late, speed};
use super::{Finding, LOGIN_REFUSED, RESTART, Severity, restarted_to_log_in};
use crate::status::{FailsJson, ServiceStatus};
use crate::text::{cut, estimated, span};

/// Problems that keep a subscription from sending at all, so that its speed says nothing.
const STOPS: [&str; 8] = [
    "destination_down",
    "endpoint_gone",
    "lanes_missing",
    "lease_failing",
    "not_driven",
    "paused",
    "store_failing",
    "subscription_unconfigured",
];
/// A deployment may kill a relay or two; from here on it is a crash loop.
const CRASHES_MIN: u32 = 3;

/// Returns all findings about a subscription.
pub(super) fn conclude(known: &Known<'_>, service: Option<&ServiceStatus>) -> Vec<Finding> {
    let address = service.map(|service| service.address.to_string());
    let mut findings: Vec<Finding> = known.info.paused.iter().map(|pause| paused(known, pause)).collect();
    findings.extend(log_differs(known));
    findings.extend(filter_differs(known));
    findings.extend(lease_fails(known));
    findings.push(driven(known, address.as_deref()));
    findings.extend(nowhere(known, service.is_some()));
    findings.extend(relay_fails(known, address.as_deref()));
    findings.extend(store_fails(known, service));
    findings.extend(relay_crashes(known));
    findings.extend(down(known, address.as_deref()));
    findings.extend(halted(known));
    findings.extend(retrying(known));
    findings.extend(dead_to_fails(known));
    findings.extend(dead(known));
    let stops = |it: &Finding| it.severity == Severity::Problem && STOPS.contains(&it.code.as_str());
    if known.fault.is_none() && !findings.iter().any(stops) {
        findings.extend(speed(known));
    }
    findings.extend(blocked(known));
    if known.stats.scheduled > 0 {
        let scheduled = known.stats.of_rows(known.stats.scheduled);
        let what = format!("{scheduled} wait for their time; {}", soonest(&known.scheduled, known.stats.scheduled));
        let cure = format!("wait; `postbox discard ID --subscription {}` cancels one", known.info.name);
        findings.push(Finding::note("scheduled", what).cure(cure));
    }
    findings.push(pending(known, service));
    findings.into_iter().map(|finding| finding.of(&known.info.name)).collect()
}

/// A relay of this configuration does not start: a position in one log means nothing in another.
fn log_differs(known: &Known<'_>) -> Option<Finding> {
    let (reads, wanted) = (&known.info.log, &known.config?.subscription.log);
    let what =
        format!("it reads the {reads}, and this configuration says {wanted}, with which `postbox run` refuses it");
    let cure = format!("write log = \"{reads}\" again, and add a subscription with another name for the {wanted}");
    (reads != wanted).then(|| Finding::problem("log_differs", what, cure))
}

/// The last relay to start sets the filter, for all of them.
fn filter_differs(known: &Known<'_>) -> Option<Finding> {
    let wanted = &known.config?.subscription.filter;
    let (reads, wants) = (known.info.filter.to_string(), wanted.to_string());
    let what = format!(
        "it reads `{}` as the last relay to start said, and this configuration says `{}`; what the former leaves out is skipped",
        cut(&reads, 120),
        cut(&wants, 120)
    );
    let cure = "give every replica the same configuration, and restart them; `postbox replay` sends what was skipped";
    (known.info.filter != *wanted).then(|| Finding::problem("filter_differs", what, cure))
}

/// Relays that crash again and again while they hold a lane.
fn relay_crashes(known: &Known<'_>) -> Option<Finding> {
    let lane = known.info.lanes.iter().max_by_key(|lane| lane.crashes).filter(|lane| lane.crashes >= CRASHES_MIN)?;
    let (crashes, lane) = (lane.crashes, lane.lane);
    let what = format!(
        "{crashes} relays in a row crashed, or were away for longer than their lease (killed, frozen), while they held \
         lane {lane}; its next events go out one at a time"
    );
    let name = &known.info.name;
    let cure = format!(
        "find out why the process ends: its exit status, its memory limit, its last log lines; events that it died of: \
         postbox list --code relay_crashed --subscription {name}"
    );
    Some(Finding::problem("relay_crashes", what, cure))
}

fn paused(known: &Known<'_>, pause: &Pause) -> Finding {
    let until = pause.until.map_or_else(String::new, |until| format!(" until {until:.0}"));
    let what = format!("paused{until} by {}: {}", pause.by, pause.why);
    let resume = format!("postbox resume {}", known.info.name);
    // A person, or a role of the database, may have that name too.
    match pause.by == Pause::BY_RELAY && pause.why.starts_with("http_410") {
        // The destination answered 410: it must never be called again.
        true => Finding::problem(
            "endpoint_gone",
            what,
            format!(
                "ask the operator of the destination; correct the sink's url or remove the subscription; then: {resume}"
            ),
        ),
        false => Finding::problem("paused", what, resume),
    }
}

/// Whether relays drive the lanes.
fn driven(known: &Known<'_>, address: Option<&str>) -> Finding {
    let (info, count) = (known.info, known.info.lanes.len());
    if count == 0 {
        return Finding::problem(
            "lanes_missing",
            "it has no lanes: somebody deleted their rows",
            "restart its relays: they create the lanes again, and the events still in the log are sent again",
        );
    }
    let idle: Vec<String> =
        info.lanes.iter().filter(|lane| !is_driven(lane)).map(|lane| lane.lane.to_string()).collect();
    if idle.is_empty() {
        let owners: BTreeSet<&str> = info.lanes.iter().filter_map(|lane| Some(lane.owner.as_ref()?.as_str())).collect();
        let owners = Vec::from_iter(owners).join(", ");
        return Finding::fine("driven", format!("{count} lane(s), driven by {owners}"));
    }
    let what = format!("no relay drives lane {} of {count}", idle.join(", "));
    let finding = match known.config {
        // Reported elsewhere: a pause, another log, a schedule and a missing sink each have their
        // own finding.
        _ if info.paused.is_some() => return Finding::fine("not_driven", what),
        Some(config) if config.subscription.log != info.log => return Finding::fine("not_driven", what),
        Some(config) if config.schedule.is_some() || config.sink.is_none() => return Finding::fine("not_driven", what),
        // It runs already, so another start would change nothing.
        Some(config) if known.work.is_some() => Finding::problem(
            "not_driven",
            format!("{what}: the service at {} runs and cannot take it", address.unwrap_or_default()),
            format!(
                "the other findings or the service's log say why; after a rename or a change of lanes, wait until the \
                 former lease ends, at most {}; who holds what: postbox subscription show {}",
                duration_text(config.settings.lease_ttl),
                info.name
            ),
        ),
        Some(_) => {
            Finding::problem("not_driven", what, "start `postbox run` with this subscription in its configuration")
        }
        None => Finding::problem(
            "subscription_unconfigured",
            format!("{what}, and it is not in the configuration"),
            format!(
                "if it was renamed there: postbox subscription rename {0} NEW (if NEW has begun already, remove that one \
                 first); if it is no longer needed: postbox subscription remove {0}; otherwise start `postbox run` with it in its configuration",
                info.name
            ),
        ),
    };
    if known.may_be_pending() { finding } else { Finding { severity: Severity::Note, ..finding } }
}

/// A subscription that is configured to keep its events for now.
fn nowhere(known: &Known<'_>, is_served: bool) -> Option<Finding> {
    let config = known.config.filter(|_| known.may_be_pending())?;
    if config.sink.is_none() {
        let what = "it has no sink: its events are kept until it has one";
        return Some(Finding::problem(
            "sink_none",
            what,
            format!("write sink = {{ … }} into [subscriptions.{}]", known.info.name),
        ));
    }
    let schedule = config.schedule.as_ref()?;
    let next = schedule.next_after(Timestamp::now());
    let when = next.map_or_else(|| "never".to_owned(), |next| format!("at {next:.0}"));
    let what = format!("it delivers at its scheduled times only ({schedule}), next {when}");
    let runs = if is_served { "" } else { " (no service answers at [server] listen: is `postbox run` running?)" };
    Some(Finding::note("schedule_waits", what).cure(format!(
        "wait{runs}, or deliver now with `postbox dispatch --subscription {}`; without `schedule` events are delivered at once",
        known.info.name
    )))
}

/// A relay that ended, or a lane whose every call fails.
fn relay_fails(known: &Known<'_>, address: Option<&str>) -> Option<Finding> {
    let fault = known
        .fault
        .filter(|_| known.work.is_none_or(|work| work.destination_fails.is_none() && work.store_fails.is_none()))?;
    let what = format!("the service at {}: {}", address.unwrap_or_default(), fault.what);
    if fault.lane.is_none() {
        return Some(restarted_to_log_in(Finding::failed(&fault.code, &what)));
    }
    let cure = "the lines \"store call failed\" in its log say why; repair the store";
    Some(Finding::problem("lane_failing", what, cure).reason(&fault.code))
}

fn store_fails(known: &Known<'_>, service: Option<&ServiceStatus>) -> Option<Finding> {
    let fails = known.work?.store_fails.as_ref().filter(|fails| !is_of_redis(&fails.code))?;
    // The reason may be that of the last connection before the password was changed.
    let mut faults = service.iter().flat_map(|it| &it.faults).filter(|fault| fault.source.is_none());
    let is_refused = fails.code == LOGIN_REFUSED || faults.any(|fault| fault.code == LOGIN_REFUSED);
    let what = format!("calls to the store have failed since {}; last reason: {}", fails.since, fails.code);
    let cure = match fails.code.as_str() {
        _ if is_refused => RESTART,
        "store_busy" => {
            "another program holds the write lock of the store's file: find its long transaction, or many one after \
             another without a pause, and end it; if the log says that reads took too long, look at the disk's load"
        }
        "store_full" => "free space on the store's disk; delivery then continues by itself",
        "store_read_only" => {
            "the primary may be down or restarting: wait for it, or repair it, and only if it will never accept writes \
             again, promote the standby; if the store's URL does not name the primary, name it there; where \
             transactions start read-only, set default_transaction_read_only = off"
        }
        "store_contention" | "statement_timeout" | "table_locked" => {
            "a session holds a lock: it is named above if it is known; otherwise look at pg_locks and pg_stat_activity"
        }
        "pool_exhausted" => "raise `pool` in [store], or look for long calls",
        _ => "repair the database; delivery then continues by itself",
    };
    Some(Finding::problem("store_failing", what, cure).reason(&fails.code))
}

/// Whether the error came from the Redis in which lanes are taken too, and not from the store.
fn is_of_redis(code: &str) -> bool {
    code.starts_with("redis_")
}

/// Lanes are taken in Redis too, and it does not grant them, so nobody drives them.
fn lease_fails(known: &Known<'_>) -> Option<Finding> {
    let FailsJson { since, code } = known.work?.store_fails.as_ref().filter(|fails| is_of_redis(&fails.code))?;
    let what = format!("lanes cannot be taken or kept in Redis ([lease]) since {since}; last reason: {code}");
    let cure = match code.as_str() {
        "redis_lease_held" => {
            "after a crash, wait until the former lease ends; if that takes longer than `lease`, another database uses the same keys (set another prefix in [lease]) or the key has no TTL (delete it: the relay's log names it)"
        }
        _ => {
            "run `postbox check-config --connect`, which says what is wrong with Redis; until it is back nothing is sent"
        }
    };
    Some(Finding::problem("lease_failing", what, cure).reason(code))
}

/// Keys that wait for a person (`on_dead = "halt"`, now or when the event died).
fn halted(known: &Known<'_>) -> Option<Finding> {
    let key = |record: &Record| record.event.key.clone();
    let halts_now = known.config.is_none_or(|config| config.subscription.on_dead == OnDead::Halt);
    // Otherwise an earlier event that is retried may be what holds the key.
    let waits_for_none = |dead: &Record| {
        known.stats.retrying <= known.retrying.len() as u64 && !known.retrying.iter().any(|it| key(it) == key(dead))
    };
    let holds = |dead: &&Record| {
        known.blocked.iter().any(|it| key(it).is_some() && key(it) == key(dead)) && (halts_now || waits_for_none(dead))
    };
    let first = known.dead.iter().find(holds)?;
    let (id, shown) = (first.event.id, cut(key(first)?.as_str(), 60).to_owned());
    let dead: Vec<_> = known.dead.iter().filter(holds).map(key).collect();
    let waiting = known.blocked.iter().filter(|it| dead.contains(&key(it))).count();
    let what = format!(
        "{} behind a dead event of their key (on_dead = \"halt\"): key {shown} behind {id}, {}",
        of_all(known.stats, "blocked", waiting, known.blocked.len(), known.stats.blocked),
        first.code.as_deref().unwrap_or("unknown")
    );
    let of = format!("--subscription {}", known.info.name);
    let cure =
        format!("once its cause is fixed: postbox retry {id} {of}; to continue without it: postbox discard {id} {of}");
    Some(Finding::problem("halted", what, cure).reason(first.code.as_deref().unwrap_or("unknown")))
}

/// Keys that wait for an earlier event.
fn blocked(known: &Known<'_>) -> Option<Finding> {
    let first = known.blocked.first()?;
    let head = known.retrying.iter().find(|it| it.event.key == first.event.key);
    let (looked, all) = (known.blocked.len(), known.stats.blocked);
    let of = if all > looked as u64 { format!("; of the first {looked}") } else { String::new() };
    let count = known.stats.of_rows(all);
    let what = format!("{count} blocked behind an earlier event of their key{of}: {}", keys(&known.blocked));
    let finding = Finding::note("blocked", what);
    let name = &known.info.name;
    Some(match head {
        // Nothing failed: the earlier event is in flight, or goes next.
        Some(head) if head.code.as_deref().is_none_or(Disposition::is_own_code) => finding,
        // The destination is down, which is a finding of its own: the event is not at fault.
        Some(head) if is_uncharged(head) => finding,
        Some(head) => {
            let id = head.event.id;
            finding.cure(format!(
                "they wait for {id}: fix what it fails at, or continue without it: postbox discard {id} --subscription {name}"
            ))
        }
        // Reported by `halted`.
        None if known.dead.iter().any(|it| it.event.key == first.event.key) => return None,
        // It is in flight for the first time, so no list shows it.
        None if known.stats.retrying == 0 => finding,
        None => finding.cure(format!(
            "they wait for the first event of each key: postbox list --state retrying --subscription {name}"
        )),
    })
}

fn dead_to_fails(known: &Known<'_>) -> Option<Finding> {
    // The service itself notices only after a while that the last one was discarded.
    let fails = known.work?.dead_to_fails.as_ref().filter(|_| known.stats.dead > 0)?;
    let what = format!("the sink of dead_to has failed since {}; last reason: {}", fails.since, fails.code);
    let cure = "fix that sink: it then gets the dead events by itself; nothing else waits for it";
    Some(Finding::problem("dead_to_down", what, cure).reason(&fails.code))
}

fn pending(known: &Known<'_>, service: Option<&ServiceStatus>) -> Finding {
    let stats = known.stats;
    if stats.pending == 0 && stats.is_estimate {
        let what = "there are too many events to tell whether any is pending here; none was found in a sample";
        return Finding::note("pending_unknown", what);
    }
    if stats.pending == 0 {
        return Finding::fine("nothing_pending", "nothing is pending");
    }
    let since = stats.oldest().map_or_else(String::new, |oldest| format!(", the oldest for {}", span(oldest)));
    let deepest = stats.topics.first().map_or_else(String::new, |topic| format!(", most of them {}", topic.topic));
    let what = format!("{} pending{since}{deepest}", estimated(stats.pending, stats.is_estimate));
    if !is_late(known) {
        return Finding::fine("pending", what);
    }
    let finding = Finding::note("pending", what);
    match known.is_driven() && known.work.is_none() && known.unread() > 0 {
        true if service.is_none() => finding.cure(
            "no service answers at [server] listen: run the doctor where its relay runs, with its configuration, to see how long calls take",
        ),
        _ => finding,
    }
}

fn keys(records: &[Record]) -> String {
    let mut keys: Vec<&str> = records.iter().filter_map(|record| Some(record.event.key.as_ref()?.as_str())).collect();
    keys.sort_unstable();
    keys.dedup();
    let shown: Vec<String> = keys.iter().take(5).map(|key| format!("key {}", cut(key, 60))).collect();
    if keys.len() > 5 { format!("{} and more", shown.join(", ")) } else { shown.join(", ") }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use postbox_core::{Filter, LaneInfo, LogName, NewEvent, Ordering, OwnerId, Seq, State, Stats, SubscriptionInfo};

    use super::*;
    use crate::config::Config;
    use crate::status::{CallsJson, FailsJson, Fault, StatsJson, WorkJson};

    /// What a service reports after so many calls of the last minute.
    fn work(ended: u64) -> WorkJson {
        let calls = CallsJson {
            ended,
            events_each: 1.0,
            seconds_each: 0.01,
            at_once: 0.1,
            at_once_max: 8,
            in_flight: 0,
            rate: None,
            rate_per_second: None,
            held_by_rate: false,
            rate_shared: false,
        };
        WorkJson {
            store: None,
            subscription: "out".parse().expect("a name"),
            calls: (ended > 0).then_some(calls),
            destination_fails: None,
            probe_in_seconds: None,
            store_fails: None,
            dead_to_fails: None,
        }
    }

    /// An event of one key that was sent two minutes ago.
    fn record(state: State, attempts: u32, code: &str) -> Record {
        let (id, now) = ("01a1fe73-bd35-7fca-ae4b-4c8c83280000".parse().expect("an id"), Timestamp::now());
        Record {
            event: NewEvent::json("order.placed", "{}").key("1").into_event(id, now),
            seq: Seq(1),
            state,
            attempts,
            replays: 0,
            due_at: Some(now),
            code: Some(code.to_owned()),
            error: None,
            updated_at: Some(now - Duration::from_secs(120)),
            last_attempts: Vec::new(),
        }
    }

    /// The findings about one failed event, one that waits behind it, and one lane.
    fn found(failed: Record, owner: Option<&str>, work: Option<&WorkJson>) -> Vec<Finding> {
        found_with(None, failed, owner, work)
    }

    fn found_with(fault: Option<&Fault>, failed: Record, owner: Option<&str>, work: Option<&WorkJson>) -> Vec<Finding> {
        let counts = Stats { pending: 2, retrying: 1, blocked: 1, total: 2, share: 100, ..Stats::default() };
        found_of(counts, fault, failed, owner, work)
    }

    fn found_of(
        counts: Stats,
        fault: Option<&Fault>,
        failed: Record,
        owner: Option<&str>,
        work: Option<&WorkJson>,
    ) -> Vec<Finding> {
        let owner = owner.map(OwnerId::from_stored);
        let lease_left = owner.as_ref().map(|_| Duration::from_secs(5));
        let info = SubscriptionInfo {
            name: "out".parse().expect("a name"),
            log: LogName::outbox(),
            filter: Filter::default(),
            ordering: Ordering::Key,
            generation: 1,
            lanes: vec![LaneInfo { lane: 0, epoch: 1, owner, lease_left, crashes: 0 }],
            paused: None,
        };
        let stats = StatsJson::of(&info, counts);
        let config = Config::parse("[subscriptions.out]\nsink = { type = \"stdout\" }\n").expect("no faults");
        let service = work.map(|work| ServiceStatus {
            version: String::new(),
            address: ([127, 0, 0, 1], 8600).into(),
            ready: true,
            faults: fault.cloned().into_iter().collect(),
            work: vec![work.clone()],
            storms: Vec::new(),
            stores: Vec::new(),
        });
        let known = Known {
            info: &info,
            stats: &stats,
            config: config.subscriptions.first(),
            work,
            fault,
            retrying: vec![failed],
            blocked: vec![record(State::Blocked, 0, "blocked")],
            scheduled: Vec::new(),
            dead: Vec::new(),
            arrivals: None,
        };
        conclude(&known, service.as_ref())
    }

    fn of<'a>(findings: &'a [Finding], code: &str) -> Option<&'a Finding> {
        findings.iter().find(|it| it.code == code)
    }

    /// The breaker of a replica on stand-by is closed whatever the destination does.
    #[test]
    fn only_a_service_that_has_called_the_destination_knows_that_it_is_up() {
        for (work, is_down) in [(None, true), (Some(work(0)), true), (Some(work(3)), false)] {
            let found = found(record(State::Retrying, 0, "connect_refused"), Some("relay-1"), work.as_ref());
            assert_eq!(of(&found, "destination_down").is_some(), is_down, "{found:#?}");
        }
    }

    /// The counts are there at once, whatever keeps the events from being read.
    #[test]
    fn dead_events_are_reported_if_none_could_be_read() {
        let counts = Stats { dead: 6, total: 6, share: 100, ..Stats::default() };
        let found = found_of(counts, None, record(State::Retrying, 3, "http_500"), Some("relay-1"), None);
        let dead = of(&found, "dead").expect("found");
        assert!(dead.message.starts_with("6 dead") && dead.severity == Severity::Problem, "{dead:?}");
        let list = "postbox list --state dead --subscription out";
        assert!(dead.cure.as_ref().is_some_and(|cure| cure.contains(list)), "{dead:?}");
    }

    #[test]
    fn a_second_sink_fails_nobody_once_no_event_is_dead() {
        let fails = FailsJson { since: "2026-01-01T00:00:00Z".into(), code: "http_413".into() };
        let work = WorkJson { dead_to_fails: Some(fails), ..work(3) };
        let found = found(record(State::Retrying, 3, "http_500"), Some("relay-1"), Some(&work));
        assert!(of(&found, "dead_to_down").is_none(), "{found:#?}");
    }

    #[test]
    fn a_service_that_cannot_take_its_lanes_is_not_to_be_started() {
        let failed = || record(State::Retrying, 3, "http_500");
        let start = "start `postbox run`";
        let found_without = found(failed(), None, None);
        let cure = of(&found_without, "not_driven").and_then(|it| it.cure.as_deref());
        assert!(cure.is_some_and(|cure| cure.contains(start)), "{found_without:#?}");
        let found_with = found(failed(), None, Some(&work(0)));
        let finding = of(&found_with, "not_driven").expect("found");
        assert!(finding.message.contains("127.0.0.1:8600 runs"), "{finding:?}");
        assert!(finding.cure.as_ref().is_some_and(|cure| !cure.contains(start)), "{finding:?}");
    }

    /// The last failure may be that of a connection that was cut before the password was changed.
    #[test]
    fn a_service_with_a_former_password_does_not_go_on_by_itself() {
        let refused = Fault { code: LOGIN_REFUSED.into(), what: "refused".into(), ..Fault::default() };
        for (fault, code, cure) in [
            (Some(&refused), "store_unavailable", "restart the service"),
            (None, "store_unavailable", "repair the database"),
            // To promote a standby beside it would make two that accept writes.
            (None, "store_read_only", "the primary may be down or restarting: wait for it"),
        ] {
            let fails = FailsJson { since: "2026-01-01T00:00:00Z".into(), code: code.into() };
            let work = WorkJson { store_fails: Some(fails), ..work(3) };
            let failed = record(State::Retrying, 3, "http_500");
            let found = found_with(fault, failed, Some("relay-1"), Some(&work));
            let said = of(&found, "store_failing").and_then(|it| it.cure.as_deref());
            assert!(said.is_some_and(|said| said.starts_with(cure)), "{found:#?}");
        }
    }

    /// A destination that named a wait of minutes is not tried when its events are due.
    #[test]
    fn a_wait_that_the_destination_named_is_said() {
        let fails = FailsJson { since: "2026-01-01T00:00:00Z".into(), code: "http_503".into() };
        let wait =
            |seconds| WorkJson { destination_fails: Some(fails.clone()), probe_in_seconds: Some(seconds), ..work(3) };
        for (work, is_said) in [(wait(570.0), true), (wait(0.5), false)] {
            let failed = Record { updated_at: Some(Timestamp::now()), ..record(State::Retrying, 0, "http_503") };
            let found = found(failed, Some("relay-1"), Some(&work));
            for code in ["destination_down", "retrying"] {
                let said = of(&found, code).is_some_and(|it| it.message.contains("9m 30s"));
                assert_eq!(said, is_said, "{found:#?}");
            }
            let cure = of(&found, "destination_down").and_then(|it| it.cure.as_deref()).unwrap_or_default();
            assert_eq!(cure.contains("postbox pause out --for 10s"), is_said, "{found:#?}");
        }
    }

    /// Calls that hung when their relay stopped keep their rows, which the next relay takes.
    #[test]
    fn a_call_is_in_flight_only_while_a_relay_holds_the_lane() {
        for owner in [Some("relay-1"), None] {
            let found = found(record(State::Retrying, 0, Disposition::IN_FLIGHT), owner, None);
            assert_eq!(of(&found, "in_flight").is_some(), owner.is_some(), "{found:#?}");
        }
    }

    #[test]
    fn nothing_is_said_of_speed_while_nobody_delivers() {
        let fails = |code: &str| FailsJson { since: "2026-01-01T00:00:00Z".into(), code: code.into() };
        let store_fails = |code: &str| WorkJson { store_fails: Some(fails(code)), ..work(3) };
        let is_said = |fault: Option<&Fault>, owner: Option<&str>, work: &WorkJson| {
            let in_flight = record(State::Retrying, 0, Disposition::IN_FLIGHT);
            of(&found_with(fault, in_flight, owner, Some(work)), "few_keys").is_some()
        };
        let owner = Some("relay-1");
        assert!(is_said(None, owner, &work(3)));
        assert!(!is_said(None, None, &work(3)), "no relay drives the lane");
        assert!(!is_said(None, owner, &store_fails("store_busy")));
        assert!(!is_said(None, owner, &store_fails("redis_lease_held")));
        for lane in [None, Some(0)] {
            let fault = Fault { lane, code: "reason".into(), what: "it fails".into(), ..Fault::default() };
            assert!(!is_said(Some(&fault), owner, &work(3)), "{fault:?}");
        }
    }

    #[test]
    fn an_event_that_waits_for_an_outage_to_end_is_not_to_be_discarded() {
        for (attempts, code, is_discarded) in [(0, "connect_refused", false), (3, "http_500", true)] {
            let found = found(record(State::Retrying, attempts, code), Some("relay-1"), None);
            let cure = of(&found, "blocked").expect("found").cure.as_ref();
            assert_eq!(cure.is_some_and(|cure| cure.contains("postbox discard")), is_discarded, "{found:#?}");
        }
    }
}
