//! Command output at terminals of 80, 100 and 120 columns, as stored in `tests/golden`. `UPDATE=1`
//! rewrites it.

use std::fmt::Write as _;
use std::path::Path;

use jiff::Timestamp;
use postbox_core::{
    Event, EventId, Filter, LaneInfo, LogName, NewEvent, Ordering, OwnerId, Pause, Record, Seq, State, Stats,
    SubscriptionInfo, SubscriptionName, TopicPattern,
};
use postbox_server::status::{Finding, Severity, StatsJson, SubscriptionJson};

use crate::commands::{doctor, list, show, stats, subscription, tail};
use crate::layout;

const WIDTHS: [u16; 3] = [80, 100, 120];
/// Terminal widths at which nothing may be too wide.
const WIDTHS_ALL: std::ops::RangeInclusive<u16> = 60..=200;

/// Renders at every width, checks that nothing is too wide, and compares with the stored output.
fn golden(name: &str, render: impl Fn(Option<u16>) -> String) {
    for width in WIDTHS_ALL {
        let shown = render(Some(width));
        let longest = shown.lines().map(|line| line.chars().count()).max().unwrap_or(0);
        assert!(longest <= usize::from(width), "{name} is {longest} wide at {width}\n{shown}");
    }
    let mut text = String::new();
    for width in WIDTHS {
        let _ = write!(text, "{width} columns\n\n{}\n", render(Some(width)));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name).with_extension("txt");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &text).expect("written");
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == text, "{name} is not as it is kept in tests/golden; if it shall be, run with UPDATE=1\n{text}");
}

fn name(name: &str) -> SubscriptionName {
    name.parse().expect("a name")
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_774_000_000 + second).expect("a time")
}

fn event(n: u128, topic: &str, key: &str) -> Event {
    let id = EventId::from_uuid(uuid::Uuid::from_u128(0x01a1_fe73_bd35_7fca_ae4b_4c8c_8328_0000 + n));
    NewEvent::json(topic, "{}").key(key).header("correlation-id", "9f8a").into_event(id, at(0))
}

fn record(n: u128, topic: &str, key: &str, code: &str, error: &str) -> Record {
    Record {
        event: event(n, topic, key),
        seq: Seq(7),
        state: State::Dead,
        attempts: 30,
        replays: 0,
        due_at: None,
        code: Some(code.to_owned()),
        error: Some(error.to_owned()),
        updated_at: Some(at(60)),
        last_attempts: Vec::new(),
    }
}

fn dead() -> [Record; 3] {
    let said = "the target answered 422 Unprocessable Entity: {\"error\":\"no such order\"}";
    [
        record(1, "order.placed", "4711", "http_422", said),
        record(2, "order.paid", "4712", "http_422", said),
        record(3, "warehouse.stock.corrected", "sku-0815", "timed_out", "no answer within 15s"),
    ]
}

fn info(of: &str, topics: &[&str], lanes: u16) -> SubscriptionInfo {
    let lane = |lane| LaneInfo {
        lane,
        epoch: 3,
        owner: Some(OwnerId::from_stored("relay-7c9f")),
        lease_left: None,
        crashes: 0,
    };
    let topics = topics.iter().map(|topic| TopicPattern::new(*topic).expect("a pattern")).collect();
    SubscriptionInfo {
        name: name(of),
        log: LogName::outbox(),
        filter: Filter { topics, ..Filter::default() },
        ordering: Ordering::Key,
        generation: 1,
        lanes: (0..lanes).map(lane).collect(),
        paused: None,
    }
}

fn subscriptions() -> Vec<(SubscriptionInfo, StatsJson)> {
    let busy = Stats {
        share: 10_000,
        skipped: 54_321,
        skipped_is_estimate: true,
        pending: 1_234_567,
        retrying: 17,
        blocked: 1_204,
        scheduled: 3,
        dead: 42,
        dispatched: 98_765_432,
        total: 99_999_999,
        is_estimate: true,
        oldest_pending: Some(std::time::Duration::from_secs(93_784)),
        ..Stats::default()
    };
    let idle = Stats { dispatched: 12, total: 12, ..Stats::default() };
    let pause = Pause { until: None, by: "ada".into(), why: "billing is migrating to the new cluster".into() };
    let busy_info = info("orders-to-billing", &["order.*", "invoice.*", "customer.address.changed"], 4);
    let idle_info = SubscriptionInfo { paused: Some(pause), ..info("search", &[], 1) };
    let (busy, idle) = (StatsJson::of(&busy_info, busy), StatsJson::of(&idle_info, idle));
    vec![(busy_info, busy), (idle_info, idle)]
}

#[test]
fn list() {
    let rows: Vec<_> = dead().iter().map(|record| list::row(Some(&name("orders-to-billing")), record, true)).collect();
    golden("list", |width| layout::rows(&list::HEAD, &rows, width));
}

#[test]
fn tail() {
    let paid = Event { payload: r#"{"order":4712,"paid":"2026-03-20"}"#.into(), ..event(2, "order.paid", "4712") };
    let shown = [event(1, "order.placed", "4711"), paid, event(3, "warehouse.stock.corrected", "sku-0815")];
    golden("tail", |width| shown.iter().map(|event| tail::for_people(event, width)).collect());
}

/// Characters of East Asia take two columns.
#[test]
fn a_line_of_tail_is_no_wider_than_its_terminal_in_any_script() {
    let paid = Event { payload: "支払いが完了しました".repeat(6).into(), ..event(1, "order.paid", "注文") };
    for width in WIDTHS_ALL {
        let shown = tail::for_people(&paid, Some(width));
        let columns: usize = shown.trim_end().chars().map(|it| if it.is_ascii() || it == '…' { 1 } else { 2 }).sum();
        assert!(columns <= usize::from(width), "it is {columns} wide at {width}: {shown}");
        assert!(width > 180 || columns + 1 >= usize::from(width), "it takes {columns} of {width}: {shown}");
    }
}

#[test]
fn stats() {
    let rows: Vec<_> = subscriptions().iter().filter_map(|(_, stats)| stats::row(stats)).collect();
    golden("stats", |width| layout::rows(&stats::HEAD, &rows, width));
}

#[test]
fn subscription_list() {
    let all = subscriptions().into_iter().map(|(info, stats)| SubscriptionJson::new(&info, Some(stats)));
    let filter = Filter {
        kinds: vec!["integration".to_owned()],
        aggregates: vec!["order".to_owned(), "invoice".to_owned()],
        headers: [("region", "eu"), ("tier", "gold")].map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        ..Filter::default()
    };
    let narrow = SubscriptionJson::new(&SubscriptionInfo { filter, ..info("partners", &[], 1) }, None);
    let rows: Vec<_> = all.chain([narrow]).map(|one| subscription::row(&one)).collect();
    golden("subscription-list", |width| layout::rows(&subscription::HEAD, &rows, width));
}

#[test]
fn show() {
    let found = [(info("orders-to-billing", &[], 1), dead()[0].clone())];
    golden("show", |width| layout::fields(&show::fields(&found), width));
}

#[test]
fn doctor() {
    let finding = |whose: Option<&str>, severity, what: &str, cure: Option<&str>| Finding {
        code: "any".to_owned(),
        reason: None,
        subscription: whose.map(str::to_owned),
        severity,
        message: what.to_owned(),
        cure: cure.map(str::to_owned),
    };
    let findings = [
        finding(
            None,
            Severity::Problem,
            "no subscription wants 1 event(s) of the outbox, the oldest for 4s: order.placed (1)",
            Some("did you mean `order.*` where the topics of orders-to-billing say `orders.*`?"),
        ),
        finding(Some("search"), Severity::Note, "paused by ada: billing is migrating", Some("postbox resume search")),
        finding(Some("orders-to-billing"), Severity::Fine, "nothing waits", None),
    ];
    golden("doctor", |width| layout::fields(&doctor::fields(&findings), width));
}
