//! Each planted violation is found, and a clean round is clean.
#![allow(clippy::unwrap_used, reason = "a test that cannot write its files cannot go on")]

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use postbox_crash_checker::arrivals::Body;
use postbox_crash_checker::{Verdict, judge};
use serde_json::{Value, json};

/// The files of a round, as lines.
#[derive(Default)]
struct Files {
    ledger: Vec<Value>,
    marks: Vec<String>,
    arrivals: Vec<String>,
    faults: Vec<Value>,
    orders: Vec<Value>,
    left: Vec<Value>,
    audit: Vec<Value>,
    /// Whether the reader is the one whose filter changes.
    is_filtered: bool,
}

impl Files {
    /// Adds a transaction with events of one key, and its mark if the database kept it.
    fn tx(&mut self, name: &str, fate: &str, versions: &[i64], is_kept: bool) {
        let event = |(n, v)| json!({ "n": n, "key": "k", "v": v, "topic": "t" });
        let kept: Vec<Value> = versions.iter().enumerate().map(event).collect();
        let at = self.ledger.len() * 10;
        self.ledger.push(json!({ "is": "events", "tx": name, "at": at, "kept": kept, "back": [] }));
        self.ledger.push(json!({ "is": "end", "tx": name, "at": at + 5, "fate": fate }));
        if is_kept {
            self.marks.push(name.to_owned());
        }
    }

    fn arrive(&mut self, status: u16, tx: &str, n: u32, v: i64) {
        self.arrivals.push(format!("{status} {}", body(tx, n, v)));
    }

    fn fault(&mut self, window: u64, from: u64, until: u64) {
        let place = |at: u64| json!([["main", at]]);
        self.faults.push(json!({
            "kind": "kill", "from": 0, "until": 1, "places_from": place(from), "places_until": place(until), "window": window
        }));
    }

    fn filter(&mut self, topic: &str, from: u64, until: u64) {
        self.fault(0, 0, 0);
        let fault = self.faults.last_mut().unwrap();
        (fault["from"], fault["until"], fault["topics"]) = (json!(from), json!(until), json!([[], [topic]]));
    }

    fn change(&mut self, what: &str, old: Value, new: Value) {
        let number = self.audit.len();
        let body = (what == "delivery").then(|| body("a", 0, 1).to_string());
        self.audit
            .push(json!({ "what": what, "old": old, "new": new, "body": body, "xid": number.to_string(), "at": 0 }));
    }

    fn judge(&self) -> Verdict {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("postbox-judge-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder: PathBuf = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        let lines = |values: &[Value]| values.iter().map(|value| format!("{value}\n")).collect::<String>();
        let texts = |texts: &[String]| texts.iter().map(|text| format!("{text}\n")).collect::<String>();
        let name = if self.is_filtered { "part" } else { "main" };
        let main = json!({ "name": name, "by_file": false, "topics": ["t"] });
        let round = json!({ "seed": 1, "subscriptions": [main], "lease": 2_000_000 }).to_string();
        for (file, text) in [
            ("round.json", round),
            ("ledger-w.jsonl", lines(&self.ledger)),
            ("marks.txt", texts(&self.marks)),
            (&format!("arrivals-{name}.log"), texts(&self.arrivals)),
            ("faults.jsonl", lines(&self.faults)),
            ("operator.jsonl", lines(&self.orders)),
            ("deliveries.jsonl", lines(&self.left)),
            ("audit.jsonl", lines(&self.audit)),
        ] {
            fs::write(folder.join(file), text).unwrap();
        }
        let verdict = judge(&folder).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        verdict
    }

    #[track_caller]
    fn finds(&self, kinds: &[&str]) {
        let verdict = self.judge();
        let found: Vec<&str> = verdict.violations.keys().map(String::as_str).collect();
        assert_eq!(found, kinds, "{verdict:?}");
        assert_eq!(verdict.is_clean(), kinds.is_empty());
    }
}

fn body(tx: &str, n: u32, v: i64) -> Value {
    json!({ "tx": tx, "n": n, "key": "k", "v": v, "pad": Body::pad(n) })
}

/// Two events that both arrived.
fn clean() -> Files {
    let mut files = Files::default();
    files.tx("a", "committed", &[1, 2], true);
    files.tx("b", "rolled_back", &[3], false);
    files.arrive(204, "a", 0, 1);
    files.arrive(204, "a", 1, 2);
    files
}

#[test]
fn a_clean_round_is_clean() {
    let files = clean();
    files.finds(&[]);
    assert_eq!((files.judge().events, files.judge().duplicates), (2, 0));
}

#[test]
fn a_missing_event_is_lost_and_tears_its_transaction() {
    let mut files = clean();
    files.arrivals.pop();
    files.finds(&["lost", "torn"]);
}

#[test]
fn a_refused_arrival_is_none_unless_the_event_is_dead() {
    let mut files = clean();
    files.tx("c", "committed", &[4], true);
    files.arrive(422, "c", 0, 4);
    files.finds(&["lost"]);
    files.left.push(json!({ "subscription": "main", "state": "dead", "body": body("c", 0, 4).to_string() }));
    files.finds(&[]);
    files.left[0]["state"] = json!("retrying");
    files.finds(&["stuck"]);
}

/// A relay that vanished excuses one event that its relays crashed with, whatever the subscription.
#[test]
fn an_event_is_dead_only_for_a_reason() {
    let mut files = clean();
    files.tx("c", "committed", &[4], true);
    files.left.push(json!({ "subscription": "main", "state": "dead", "body": body("c", 0, 4).to_string() }));
    files.finds(&["dead for no reason"]);
    files.left[0]["code"] = json!("relay_crashed");
    files.finds(&["dead for no reason"]);
    files.fault(1, 0, 0);
    files.faults[0]["kind"] = json!("relay SIGSTOP past the lease");
    files.finds(&[]);
    assert_eq!(files.judge().facts["dead"], 1);
    files.left[0]["subscription"] = json!("part");
    files.is_filtered = true;
    files.finds(&[]);
    files.faults[0]["window"] = json!(0);
    files.finds(&["dead for no reason"]);
    files.faults.clear();
    files.arrive(422, "c", 0, 4);
    files.finds(&["dead for no reason"]);
}

#[test]
fn what_was_rolled_back_altered_or_never_appended_is_a_phantom() {
    for (tx, v) in [("b", 3), ("a", 7), ("nobody", 1)] {
        let mut files = clean();
        files.arrive(204, tx, 0, v);
        files.finds(&["phantom"]);
    }
}

#[test]
fn an_unknown_commit_is_what_the_database_says() {
    for (is_kept, arrives, violation) in
        [(true, true, None), (false, false, None), (true, false, Some("lost")), (false, true, Some("phantom"))]
    {
        let mut files = clean();
        files.tx("c", "unknown", &[5], is_kept);
        if arrives {
            files.arrive(204, "c", 0, 5);
        }
        files.finds(violation.as_slice());
    }
}

#[test]
fn a_commit_that_the_database_forgot_is_named() {
    let mut files = clean();
    files.tx("c", "committed", &[5], false);
    files.finds(&["taken back by the database"]);
}

#[test]
fn an_asynchronous_commit_may_vanish_but_not_after_it_was_sent() {
    let mut files = clean();
    files.tx("c", "committed_async", &[5], false);
    files.finds(&[]);
    files.arrive(204, "c", 0, 5);
    files.finds(&["phantom"]);
}

/// A filter counts from when it was in force, whatever the order of the lines about its changes.
#[test]
fn what_the_filter_does_not_want_is_a_phantom() {
    let mut files = Files { is_filtered: true, ..clean() };
    files.filter("t", 8, 20);
    files.filter("u", 1, 7);
    files.tx("later", "committed", &[4], true);
    files.arrive(204, "later", 0, 4);
    files.finds(&[]);
    files.faults.remove(0);
    files.finds(&["phantom"]);
}

/// Of two changes at one time, either may be the last.
#[test]
fn what_one_of_two_filters_wants_is_none() {
    let mut files = Files { is_filtered: true, ..clean() };
    files.filter("t", 1, 9);
    files.filter("u", 5, 7);
    files.tx("later", "committed", &[4], true);
    files.arrive(204, "later", 0, 4);
    files.finds(&[]);
}

#[test]
fn a_later_one_first_is_misordered() {
    let mut files = clean();
    files.arrivals.reverse();
    files.finds(&["misordered"]);
}

#[test]
fn one_that_passes_a_refused_one_is_misordered() {
    let mut files = clean();
    files.arrivals.clear();
    files.arrive(500, "a", 0, 1);
    files.arrive(204, "a", 1, 2);
    files.arrive(204, "a", 0, 1);
    files.finds(&["misordered"]);
}

#[test]
fn a_duplicate_needs_a_fault_in_between_and_a_window_that_has_room() {
    let mut files = clean();
    files.arrive(204, "a", 0, 1);
    files.finds(&["duplicates unexplained"]);
    files.fault(1, 10_000, 10_001);
    files.finds(&["duplicates unexplained"]);
    files.faults.clear();
    files.fault(1, 10, 500);
    files.finds(&[]);
    files.arrive(204, "a", 1, 2);
    files.finds(&["duplicates beyond bound"]);
}

/// The fault comes between both arrivals, but its victims had sent other events since the first.
#[test]
fn a_duplicate_far_from_every_fault_is_unexplained() {
    let mut files = clean();
    files.arrive(204, "a", 0, 1);
    let end = |lines: &[String]| lines.iter().map(|line| line.len() as u64 + 1).sum::<u64>();
    let (far, near) = (end(&files.arrivals[..2]), end(&files.arrivals[..1]));
    files.fault(1, far, far);
    files.finds(&["duplicates unexplained"]);
    files.fault(1, near, near);
    files.finds(&[]);
}

/// The window of one fault does not explain what came again because of another.
#[test]
fn each_fault_has_a_bound_of_its_own() {
    let mut files = clean();
    files.arrive(204, "a", 0, 1);
    files.arrive(204, "a", 1, 2);
    files.fault(1, 10, 500);
    files.fault(100, 10_000, 10_001);
    files.finds(&["duplicates beyond bound"]);
    files.fault(1, 10, 500);
    files.finds(&[]);
    files.faults[0]["missed"] = json!(true);
    files.finds(&["duplicates beyond bound"]);
    assert_eq!(files.judge().faults["kill"], 2);
}

/// The first fault explains both repetitions, the second only the earlier one.
#[test]
fn a_fault_is_kept_for_what_no_other_explains() {
    let mut files = clean();
    files.arrive(204, "a", 0, 1);
    files.arrive(204, "a", 1, 2);
    files.fault(1, 0, 500);
    files.fault(1, 0, 0);
    files.finds(&[]);
}

#[test]
fn a_lost_lease_needs_a_fault_that_can_cost_it() {
    let mut files = clean();
    files.fault(1, 0, 0);
    files.faults[0]["is_stall"] = json!(true);
    files.finds(&["lease lost for no reason"]);
    files.fault(1, 0, 0);
    files.finds(&[]);
    files.faults[1]["kind"] = json!("relay SIGKILL");
    files.finds(&["lease lost for no reason"]);
    files.faults[1]["kind"] = json!("database SIGKILL");
    files.faults[0]["from"] = json!(10_000_000);
    files.finds(&["lease lost for no reason"]);
    assert!(!files.judge().facts.contains_key(LATE));
}

/// The name of the fact that replaces the violation where nobody took the lane.
const LATE: &str = "leases not renewed in time, without a fault";

#[test]
fn a_lease_that_a_slow_machine_did_not_renew_is_a_fact() {
    let mut files = clean();
    files.fault(1, 0, 0);
    files.faults[0]["is_stall"] = json!(true);
    files.faults[0]["detail"] = json!("lease_not_renewed");
    files.finds(&[]);
    assert_eq!(files.judge().facts[LATE], 1);
    files.faults[0]["detail"] = json!("stale_lease");
    files.finds(&["lease lost for no reason"]);
}

#[test]
fn a_relay_that_panicked_has_failed() {
    let mut files = clean();
    files.fault(0, 0, 0);
    files.faults[0]["kind"] = json!("relay failed");
    files.faults[0]["detail"] = json!("exit status: 101: thread 'main' panicked");
    files.finds(&["relay failed"]);
}

#[test]
fn a_relay_that_gave_up_has_failed_unless_its_store_was_away() {
    let mut files = clean();
    files.fault(0, 0, 0);
    files.faults[0]["kind"] = json!("relay ended with code 1");
    files.finds(&["relay failed"]);
    files.fault(1, 0, 0);
    files.faults[1]["kind"] = json!("database SIGKILL");
    files.finds(&[]);
    files.faults[0]["from"] = json!(20_000_000);
    files.finds(&["relay failed"]);
}

#[test]
fn what_a_restore_took_back_may_be_there_or_not_and_comes_again() {
    let mut files = clean();
    files.tx("c", "committed", &[5, 6], false);
    files.arrive(204, "c", 0, 5);
    files.arrive(204, "a", 0, 1);
    files.fault(0, 210, 210);
    files.faults[0]["copied_at"] = json!(0);
    files.faults[0]["copied_places"] = json!([["main", 0]]);
    files.faults[0]["until"] = json!(1_000);
    files.finds(&[]);
    assert_eq!(files.judge().duplicates, 0);
}

#[test]
fn a_cursor_goes_on_from_where_it_ended_and_never_back() {
    let lane = |epoch: u64, from: &str, to: &str, last: u64| json!({ "subscription": 1, "lane": 0, "epoch": epoch, "from_snap": from, "to_snap": to, "last_seq": last, "owner": "o" });
    let before = lane(2, "1:5:", "1:9:", 7);
    for (after, is_allowed) in [
        (lane(2, "1:9:", "1:12:", 0), true),
        (lane(3, "1:5:", "1:9:", 7), true),
        (lane(2, "1:5:", "1:9:", 8), true),
        (lane(1, "1:5:", "1:9:", 7), false),
        (lane(2, "1:5:", "1:9:", 6), false),
        (lane(2, "1:5:", "1:12:", 0), false),
        (lane(2, "1:9:", "1:8:", 0), false),
    ] {
        let mut files = clean();
        files.change("lane", before.clone(), after);
        files.finds(if is_allowed { &[] } else { &["stale"] });
    }
}

#[test]
fn a_row_of_the_log_is_only_read() {
    let mut files = clean();
    files.change("outbox", json!({ "seq": 1 }), json!({ "seq": 1 }));
    files.finds(&["stale"]);
}

#[test]
fn a_lane_is_taken_from_another_only_when_its_lease_ran_out() {
    for (owner, until, is_allowed) in [("other", 1_000, false), ("other", -1, true), ("o", 1_000, true)] {
        let mut files = clean();
        let lane = |epoch: u64, owner: &str| json!({ "subscription": 1, "lane": 0, "epoch": epoch, "owner": owner });
        files.change("lane", lane(1, "o"), lane(2, owner));
        files.audit[0]["lease_until"] = json!(until);
        files.finds(if is_allowed { &[] } else { &["stale"] });
    }
}

/// A step of the clock hides only the take-overs within it, and the table says how many.
#[test]
fn a_lane_is_judged_outside_a_clock_step() {
    let mut files = clean();
    let lane = |epoch: u64, owner: &str| json!({ "subscription": 1, "lane": 0, "epoch": epoch, "owner": owner, "lease_until": "then" });
    files.change("lane", lane(1, "o"), lane(2, "other"));
    files.audit[0]["lease_until"] = json!(1_000);
    files.fault(0, 0, 0);
    files.faults[0]["kind"] = json!("database clock step");
    files.finds(&[]);
    assert_eq!(files.judge().facts["take-overs not judged"], 1);
    (files.audit[0]["at"], files.audit[0]["lease_until"]) = (json!(9_000_000), json!(9_001_000));
    files.finds(&["stale"]);
}

#[test]
fn an_event_that_arrived_is_dead_only_where_somebody_said_so() {
    let mut files = clean();
    files.left.push(json!({ "subscription": "main", "state": "dead", "body": body("a", 0, 1).to_string() }));
    files.finds(&["stale"]);
    files.orders.push(json!({ "op": "mark-dead", "events": ["a/0"] }));
    files.finds(&[]);
}

#[test]
fn rows_change_as_the_state_machine_allows() {
    let row = |state: &str| {
        if state.is_empty() {
            Value::Null
        } else {
            json!({ "subscription": 1, "seq": 4, "state": state, "attempts": 1, "replays": 0 })
        }
    };
    for (from, to, is_allowed) in [
        ("", "retrying", true),
        ("blocked", "retrying", true),
        ("retrying", "dead", true),
        ("retrying", "", true),
        ("retrying", "blocked", false),
        ("dead", "retrying", false),
        ("dead", "", false),
        ("discarded", "retrying", false),
        ("retrying", "discarded", false),
    ] {
        let mut files = clean();
        files.change("delivery", row(from), row(to));
        files.finds(if is_allowed { &[] } else { &["stale"] });
    }
    let mut files = clean();
    files.change("delivery", row("retrying"), Value::Null);
    files.change("delivery", Value::Null, row("dead"));
    files.finds(&["stale"]);
    let mut files = clean();
    files.change("delivery", row("dead"), row("retrying"));
    files.orders.push(json!({ "op": "retry", "events": ["a/0"] }));
    files.finds(&[]);
}
