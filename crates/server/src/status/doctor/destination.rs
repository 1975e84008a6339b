//! Findings about a destination that is down or refuses events, and the cure for each code.

use std::time::Duration;

use jiff::Timestamp;
use postbox_config::duration_text;
use postbox_core::{Disposition, Envelope, Record, Unreadable};

use super::Finding;
use super::asked::{Known, is_driven};
use crate::status::{StatsJson, WorkJson};
use crate::text::{cut, span};

/// Number of events that must fail for the same reason before the destination is blamed and not an
/// event.
const SAME_MIN: usize = 3;
/// Shortest pause that is suggested; with the default lease, a relay looks three times meanwhile.
const PAUSE_MIN: Duration = Duration::from_secs(10);
/// A destination that is up calls back each event within this time, unless the event waits longer
/// because the destination asked for it.
const LONG_AGO: Duration = Duration::from_secs(60);

/// A destination that is down: as reported by the running service, or by events that failed without
/// being charged an attempt.
pub(super) fn down(known: &Known<'_>, address: Option<&str>) -> Option<Finding> {
    let uncharged = known.retrying.iter().filter_map(|record| Some((record, record.code.as_deref()?)));
    let last = uncharged
        .filter(|(record, code)| is_uncharged(record) && !Disposition::is_own_code(code))
        .max_by_key(|(record, _)| record.updated_at);
    let tried = last.and_then(|(record, _)| record.updated_at);
    let tried = tried.and_then(|at| Duration::try_from(Timestamp::now().duration_since(at)).ok());
    // What waits since an outage that is over says nothing about now. That it is over is known only
    // to a service that has called since: a replica on stand-by has its breaker closed, too.
    let is_up = known.work.is_some_and(|work| {
        work.destination_fails.is_none() && work.calls.as_ref().is_some_and(|calls| calls.ended > 0)
    });
    if is_up && tried.is_some_and(|ago| ago > LONG_AGO) {
        return None;
    }
    let said = last.map(|(record, code)| {
        let ago = tried.map_or_else(String::new, |ago| format!("{} ago, ", span(ago)));
        format!("last tried {ago}{code}: {}", cut(text(record), 200))
    });
    // A pause is reported by itself, and must not be replaced by another one.
    let is_tried = known.info.paused.is_none();
    let next = known.work.filter(|_| is_tried).and_then(WorkJson::probe_in).filter(|wait| *wait > PAUSE_MIN);
    let open = known.work.and_then(|work| work.destination_fails.as_ref()).filter(|_| is_tried).map(|fails| {
        let (address, since, code) = (address.unwrap_or_default(), &fails.since, &fails.code);
        let next = next.map_or_else(String::new, |wait| format!("; it is tried again in {}", span(wait)));
        format!(
            "the service at {address}: the breaker has been open since {since}, nothing is sent; last reason: {code}{next}"
        )
    });
    let what = match (&open, said) {
        (None, None) => return None,
        (Some(open), None) => open.clone(),
        (None, Some(said)) => format!("the destination is unavailable, no attempt is counted; {said}"),
        (Some(open), Some(said)) => format!("{open}; {said}"),
    };
    let code = last.map(|(_, code)| code);
    let code = code.or_else(|| known.work?.destination_fails.as_ref().map(|fails| fails.code.as_str()))?;
    let text = last.map(|(record, _)| text(record)).unwrap_or_default();
    let mut cure = cure_down(code, text).to_owned();
    // A relay looks every third of its lease.
    let lease = known.config.map_or(Duration::ZERO, |config| config.settings.lease_ttl);
    let pause = (lease / 2).max(PAUSE_MIN);
    let waits_long = next.is_some_and(|wait| wait > pause) || tried.is_none_or(|ago| ago > pause);
    if open.is_some() && waits_long {
        let long = duration_text(pause);
        cure.push_str(&format!("; to try again in {long}, not later: postbox pause {} --for {long}", known.info.name));
    }
    Some(Finding::problem("destination_down", what, cure).reason(code))
}

/// Whether an event with a reason failed because its destination was down, and not by itself. One
/// that a person retried still carries its old reason, which says nothing about now.
pub(super) fn is_uncharged(record: &Record) -> bool {
    record.attempts == 0 && record.replays == 0
}

/// Events that failed and will be retried.
pub(super) fn retrying(known: &Known<'_>) -> Vec<Finding> {
    // Without a code nothing failed: the event was replayed, or left the stream because a changed
    // filter now wants it.
    let (untried, tried): (Vec<&Record>, Vec<&Record>) = known.retrying.iter().partition(|it| it.code.is_none());
    let failed = tried.into_iter().filter(|it| !it.code.as_deref().is_some_and(Disposition::is_own_code));
    let failed: Vec<&Record> = failed.collect();
    let (looked, all) = (known.retrying.len(), known.stats.retrying);
    let untried = (!untried.is_empty()).then(|| {
        let of = of_all(known.stats, "retrying", untried.len(), looked, all);
        Finding::note("untried", format!("{of}: to be sent again, not tried yet"))
    });
    if failed.is_empty() && untried.is_none() {
        // A relay that has stopped left such rows for the next one.
        let is_under_way = !known.retrying.is_empty() && known.info.lanes.iter().any(is_driven);
        let of = of_all(known.stats, "retrying", looked, looked, all);
        let under_way = is_under_way.then(|| format!("{of}: in flight for longer than others"));
        return under_way.map(|what| Finding::note("in_flight", what)).into_iter().collect();
    }
    let mut soonest = soonest(&known.retrying, all);
    if let Some(wait) = known.work.and_then(WorkJson::probe_in).filter(|wait| *wait > PAUSE_MIN) {
        soonest.push_str(&format!(", but nothing is sent for {}", span(wait)));
    }
    let reasons = reasons(&failed);
    let mut findings: Vec<Finding> = reasons
        .iter()
        .map(|reason| {
            let of = of_all(known.stats, "retrying", reason.count, looked, all);
            let what = format!("{of}: {}; {soonest}", reason.said());
            let charged = failed.iter().filter(|it| it.code.as_deref() == Some(reason.code) && it.attempts > 0);
            if charged.count() < SAME_MIN {
                let note = Finding::note("retrying", what).reason(reason.code);
                let (code, name) = (reason.code, &known.info.name);
                let now = format!("to send them now: postbox retry --code {code} --subscription {name}");
                return if waits_long(&known.retrying) { note.cure(now) } else { note };
            }
            Finding::problem("destination_refuses", what, cure_refused(reason.code, false)).reason(reason.code)
        })
        .collect();
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings.extend(untried);
    findings
}

/// Dead events, by reason. If none could be read in time, their number is known all the same.
pub(super) fn dead(known: &Known<'_>) -> Vec<Finding> {
    let dead: Vec<&Record> = known.dead.iter().collect();
    let name = &known.info.name;
    if dead.is_empty() && known.stats.dead > 0 {
        let what = format!("{} dead; their reasons were not read", known.stats.of_rows(known.stats.dead));
        let cure = format!("postbox list --state dead --subscription {name} shows why");
        return vec![Finding::problem("dead", what, cure)];
    }
    let finding = |reason: &Reason<'_>| {
        let of = of_all(known.stats, "dead", reason.count, dead.len(), known.stats.dead);
        let what = format!("{of}: {}", reason.said());
        // An expired event would expire again, poison is never sent, and a deleted event is gone.
        let is_of_reason = |record: &&&Record| record.code.as_deref() == Some(reason.code);
        let is_poison =
            dead.iter().find(is_of_reason).is_some_and(|it| Unreadable::poison(&it.event.headers).is_some());
        let is_final = [Disposition::EXPIRED, Unreadable::MISSING].contains(&reason.code);
        let verb = if is_poison || is_final { "discard" } else { "retry" };
        let again = format!(
            "look at one with `postbox show ID`, then: postbox {verb} --code {} --subscription {name}",
            reason.code
        );
        let first = match is_poison {
            true => "the received message is not a valid event: fix its sender, and have it sent again",
            false => cure_refused(reason.code, true),
        };
        Finding::problem("dead", what, format!("{first}; {again}")).reason(reason.code)
    };
    reasons(&dead).iter().map(finding).collect()
}

/// A reason that several events failed for.
struct Reason<'a> {
    code: &'a str,
    count: usize,
    text: &'a str,
}

impl Reason<'_> {
    /// The destination's text is safe to print: it was neutralised when it was stored.
    fn said(&self) -> String {
        match self.text {
            "" => self.code.to_owned(),
            text => format!("{} (\"{}\")", self.code, cut(text, 100)),
        }
    }
}

/// Most frequent first, with one example text each.
fn reasons<'a>(records: &[&'a Record]) -> Vec<Reason<'a>> {
    let mut reasons: Vec<Reason<'a>> = Vec::new();
    for record in records {
        let code = record.code.as_deref().unwrap_or("unknown");
        match reasons.iter_mut().find(|known| known.code == code) {
            Some(known) => known.count += 1,
            None => reasons.push(Reason { code, count: 1, text: text(record) }),
        }
    }
    reasons.sort_by_key(|reason| std::cmp::Reverse(reason.count));
    reasons
}

/// Phrases how many of all events in a state this is about. If not all were looked at, the rest may
/// be there for another reason.
pub(super) fn of_all(stats: &StatsJson, state: &str, count: usize, looked: usize, all: u64) -> String {
    match all > looked as u64 {
        true => format!("{} {state}, {count} of the {looked} looked at", stats.of_rows(all)),
        false => format!("{count} {state}"),
    }
}

fn text(record: &Record) -> &str {
    record.error.as_deref().unwrap_or_default()
}

/// When the next of these events is due. Says how many these are if there are more: one of the
/// others may be due sooner.
pub(super) fn soonest(records: &[Record], all: u64) -> String {
    let Some(at) = records.iter().filter_map(|record| record.due_at).min() else { return "none has a due time".into() };
    let looked = records.len();
    let of = if all > looked as u64 { format!(" of the {looked} looked at") } else { String::new() };
    match Duration::try_from(at.duration_since(Timestamp::now())) {
        Ok(left) => format!("the next{of} in {}", span(left)),
        Err(_) => format!("the next{of} is due now"),
    }
}

/// Whether none of these events is due soon.
fn waits_long(records: &[Record]) -> bool {
    let soon = Timestamp::now() + LONG_AGO;
    records.iter().all(|record| record.due_at.is_some_and(|at| at > soon))
}

/// The cure for a destination that is down. It is retried by itself, so delivery resumes without a
/// restart, unless the cure is to change a key of the configuration: those are read at the start.
fn cure_down(code: &str, text: &str) -> &'static str {
    match code {
        "address_forbidden" => {
            "Postbox's address guard refused the address: correct the sink's url, or if it may be called, name its network in the sink's allow = [\"…\"]"
        }
        "dns_failed" => {
            "the host name in the sink's url cannot be resolved where the relay runs: correct the name, or the resolver there"
        }
        // EMFILE and ENFILE.
        "connect_failed" if text.contains("(os error 24)") || text.contains("(os error 23)") => {
            "the relay can open no more files: raise its limit (ulimit -n, LimitNOFILE=), or lower server.connections"
        }
        "connect_refused" | "connect_failed" | "connect_timeout" => {
            "is the destination up, and can the relay's machine reach the host and port of the sink's url?"
        }
        // The first bytes of the answer were not TLS.
        "tls_failed" if text.contains("InvalidContentType") => {
            "this port does not speak TLS: correct the port in the sink's url, or write a url without TLS if that is intended"
        }
        "tls_failed" => {
            "is the destination's certificate for this host name, and still valid? If a private CA signed it, set the sink's ca_file"
        }
        "client_cert_required" => "set the sink's client_cert and client_key, and restart",
        "client_cert_refused" => {
            "the destination must trust the CA of the sink's client_cert; has the certificate expired? Renewed files are read without a restart"
        }
        "timeout" => {
            "the destination accepts connections but does not answer: look there, or raise the subscription's `timeout` if calls may take that long"
        }
        "connection_lost" => {
            "the destination, or a proxy before it, closes connections without an answer: look at its log; does the port expect TLS while the sink's url says http://?"
        }
        "http_429" => "set the subscription's `rate` to what the destination allows",
        "http_502" | "http_503" | "http_504" => {
            "the gateway answers, but the service behind it does not: look there; delivery continues by itself when it is back"
        }
        // Of a `file` or `stdout` sink: ENOSPC, ENOENT, EPIPE.
        "write_failed" if text.contains("(os error 28)") => "the file of the sink cannot be written: is its disk full?",
        "write_failed" if text.contains("(os error 2)") => {
            "the folder of the sink's file is gone: create it again, or correct the sink's path"
        }
        "write_failed" if text.contains("(os error 32)") => {
            "the program that reads the relay's output has ended: start both again"
        }
        "write_failed" => {
            "the sink's file or output cannot be written: is the disk full, the folder gone, writing not permitted, or the reader of the output gone?"
        }
        // Of a `bus` sink.
        "store_unreachable" => "is its database up, and can the relay's machine reach its host and port?",
        code if is_unreachable(code) => "is the broker up, and can the relay's machine reach its host and port?",
        code if code.ends_with("unauthorized") => "the broker refuses the sink's user or password: correct them",
        _ => "fix the destination, or the sink's configuration; delivery then continues by itself",
    }
}

/// Whether a code of any sink or source says that its server cannot be reached.
pub(crate) fn is_unreachable(code: &str) -> bool {
    ["connect_refused", "connect_failed", "connect_timeout", "_unreachable", "_disconnected"]
        .iter()
        .any(|it| code.ends_with(it))
}

/// The cure for a destination that answers and refuses.
fn cure_refused(code: &str, is_dead: bool) -> &'static str {
    match code {
        "http_401" | "http_403" => {
            "the destination refuses the sink's credentials: correct its secret, headers or url; or the clock of the relay's host is wrong"
        }
        "http_404" | "http_405" => {
            "the destination has no endpoint at this address: correct the path in the sink's url"
        }
        "http_410" => {
            "the destination says that it is gone for good, which paused the subscription: correct the sink's url and resume it before the retry, or write discard instead of retry"
        }
        "http_413" => "the event is too large for the destination: raise its limit, or send less",
        "http_redirect" => {
            "the destination has moved: write its final address into the sink's url; curl -i -X POST shows it"
        }
        "http_400" | "http_422" => {
            "the destination rejects the event as invalid: fix the program that appends it, or the destination"
        }
        Envelope::NOT_JSON => {
            "the payload is not JSON, and the sink's `envelope` takes nothing else: write another one and restart before the retry, or write discard instead of retry"
        }
        "row_undecodable" | "headers_invalid" => "the event cannot be read: repair its row or discard it",
        Disposition::MARKED_DEAD => {
            "a person marked it dead, and its text says why: retry it once that is fixed, or discard it for good"
        }
        Disposition::EXPIRED => "it was not delivered before its `expires_at`: append it again if it is still wanted",
        "event_missing" => "somebody deleted the event from the log: discard it",
        "timeout" => "the destination takes too long for it: look there, or raise the subscription's `timeout`",
        "relay_crashed" => {
            "the program crashes while it sends the event: look at its log, its exit code and its memory use"
        }
        "panic" => "the handler panicked: its message and the log say where",
        code if code.starts_with("http_5") && !is_dead => {
            "the destination fails on these events: look at its log; they are retried by themselves"
        }
        code if code.starts_with("http_5") => "the destination failed at each attempt: look at its log",
        _ => "its text says why: fix that",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Receivers refuse what is signed with a time that is too far from theirs.
    #[test]
    fn a_refused_signature_may_be_the_fault_of_a_clock() {
        assert!(cure_refused("http_401", true).contains("the clock of the relay's host is wrong"));
    }

    /// A retry alone would end as before.
    #[test]
    fn what_would_be_dead_again_has_its_cure_before_the_retry() {
        assert!(cure_refused("http_410", true).contains("resume it before the retry"));
        let envelope = cure_refused("payload_not_json", true);
        assert!(envelope.contains("the sink's `envelope`") && envelope.contains("discard instead"), "{envelope}");
    }

    /// The http sink reads changed files, but keys of the configuration only at the start.
    #[test]
    fn a_client_certificate_needs_a_restart_only_when_it_is_first_configured() {
        assert!(cure_down("client_cert_required", "").ends_with("and restart"));
        assert!(cure_down("client_cert_refused", "").ends_with("are read without a restart"));
    }

    #[test]
    fn a_file_that_cannot_be_written_has_the_cure_of_its_reason() {
        for (reason, cure) in
            [(28, "is its disk full?"), (2, "the folder of"), (32, "has ended"), (13, "not permitted")]
        {
            let text = format!("out.jsonl: {}", std::io::Error::from_raw_os_error(reason));
            assert!(cure_down("write_failed", &text).contains(cure), "{text}");
        }
    }

    #[test]
    fn a_relay_without_open_files_is_no_fault_of_its_destination() {
        let text = format!("tcp open error: {}", std::io::Error::from_raw_os_error(24));
        assert!(cure_down("connect_failed", &text).contains("ulimit -n"), "{text}");
        assert!(cure_down("connect_failed", "no route to host").starts_with("is the destination up"));
    }

    #[test]
    fn a_bus_that_is_down_is_a_database_and_no_broker() {
        assert!(cure_down("store_unreachable", "").starts_with("is its database up"));
        assert!(cure_down("kafka_unreachable", "").starts_with("is the broker up"));
    }
}
