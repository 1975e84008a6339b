//! A producer with a writer's rights writes whatever the database accepts. No event of another
//! producer is late or lost, and each of its own is delivered unchanged or dead with a code.
//! `POSTBOX_SEED=n` replays its rows.

#![allow(clippy::print_stdout, reason = "a random test prints its seed")]

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use postbox_core::{Delivery, Event, EventId, LogName, Store as _, Subscription, SubscriptionName};
use postbox_engine::Relay;
use postbox_postgres::{PostgresConfig, PostgresStore, Roles};
use postbox_router::handler_sink;
use postbox_testkit::hostile;
use postbox_testkit::servers::Version;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};
use tokio_util::sync::CancellationToken;

use crate::support::{self, url_as};

const ROWS: usize = 10_000;
/// Number of connections that write the hostile rows.
const WRITERS: usize = 4;
/// Longest time from commit to delivery for an event of the honest producer.
const LATE: Duration = Duration::from_secs(1);
/// Far longer than the whole test takes.
const PATIENCE: Duration = Duration::from_secs(300);
/// How often the honest producer appends.
const PACE: Duration = Duration::from_millis(50);
/// Key of the honest producer. The hostile one uses it too.
const KEY: &str = "honest";
const TOPIC: &str = "honest.news";

/// Every column that a writer may set, except `payload_bytes`.
const COLUMNS: [&str; 14] = [
    "id",
    "topic",
    "key",
    "aggregate",
    "version",
    "kind",
    "source",
    "tenant",
    "payload",
    "content_type",
    "headers",
    "occurred_at",
    "deliver_at",
    "expires_at",
];

/// A row to be written: its columns as text, and its bytes.
struct Row {
    columns: [Option<String>; 14],
    bytes: Option<Vec<u8>>,
}

impl Row {
    fn random(random: &mut SmallRng, id: EventId) -> Self {
        let payloads = hostile::payloads();
        let payload = payloads.choose(random).cloned().unwrap_or_default();
        let text = String::from_utf8(payload.clone()).ok().filter(|_| random.random_bool(0.7));
        let bytes = (text.is_none() || random.random_bool(0.02)).then_some(payload);
        let text = text.filter(|_| random.random_bool(0.98));
        let id =
            if random.random_bool(0.02) { "00000000-0000-0000-0000-000000000000".to_owned() } else { id.to_string() };
        let columns = [
            Some(id),
            rarely(random, 0.99, |random| name(random, 255)),
            rarely(random, 0.6, |random| if random.random_bool(0.2) { KEY.to_owned() } else { name(random, 1_024) }),
            rarely(random, 0.2, |random| name(random, 128)),
            rarely(random, 0.3, |random| pick(random, &["0", "-1", "9223372036854775807", "-9223372036854775808"])),
            rarely(random, 0.2, |random| name(random, 128)),
            rarely(random, 0.2, |random| name(random, 128)),
            rarely(random, 0.3, |random| name(random, 128)),
            text,
            rarely(random, 0.3, |random| {
                let some = ["application/json", "text/plain; charset=x", "", "a\r\nb: c", "\u{202e}", "null"];
                pick(random, &some)
            }),
            rarely(random, 0.4, headers),
            rarely(random, 0.98, date),
            rarely(random, 0.3, date),
            rarely(random, 0.1, date),
        ];
        Self { columns, bytes }
    }

    async fn insert(&self, client: &Client) -> Result<u64, tokio_postgres::Error> {
        let kinds = [
            "uuid",
            "text",
            "text",
            "text",
            "bigint",
            "text",
            "text",
            "text",
            "text",
            "text",
            "jsonb",
            "timestamptz",
            "timestamptz",
            "timestamptz",
        ];
        let values = (1..).zip(kinds).map(|(n, kind)| format!("${n}::text::{kind}")).collect::<Vec<_>>().join(", ");
        let sql = format!("INSERT INTO postbox.outbox ({}, payload_bytes) VALUES ({values}, $15)", COLUMNS.join(", "));
        let mut params: Vec<(&(dyn ToSql + Sync), Type)> =
            self.columns.iter().map(|value| (value as &(dyn ToSql + Sync), Type::TEXT)).collect();
        params.push((&self.bytes, Type::BYTEA));
        client.execute_typed(&sql, &params).await
    }

    /// Whether the event arrived as it was written, apart from its dates.
    fn is(&self, event: &Event) -> bool {
        let text = |value: &Option<String>| value.clone();
        let [_, topic, key, aggregate, version, kind, source, tenant, payload, content_type, headers, ..] =
            &self.columns;
        let written: BTreeMap<String, String> =
            headers.as_deref().map(|json| serde_json::from_str(json).expect("an object of texts")).unwrap_or_default();
        let payload = payload.as_ref().map(|text| text.as_bytes()).or(self.bytes.as_deref()).unwrap_or_default();
        text(topic).as_deref() == Some(event.topic.as_str())
            && text(key) == event.key.as_ref().map(ToString::to_string)
            && text(aggregate) == event.aggregate
            && text(version) == event.version.map(|version| version.to_string())
            && text(kind) == event.kind
            && text(source) == event.source
            && text(tenant) == event.tenant.as_ref().map(ToString::to_string)
            && *payload == event.payload[..]
            && text(content_type) == event.content_type
            && written == event.headers
    }
}

fn rarely<T>(random: &mut SmallRng, chance: f64, make: impl FnOnce(&mut SmallRng) -> T) -> Option<T> {
    random.random_bool(chance).then(|| make(random))
}

fn pick(random: &mut SmallRng, from: &[&str]) -> String {
    (*from.choose(random).expect("not empty")).to_owned()
}

/// Returns a name in any language, sometimes too long or invalid.
fn name(random: &mut SmallRng, bytes_max: usize) -> String {
    match random.random_range(0..40) {
        0 => "x".repeat(bytes_max + 1),
        1 => pick(random, &["", " ", "a b", "a\nb", "\u{1}", "\u{85}", "\u{a0}"]),
        2 => "x".repeat(bytes_max),
        3..10 => (0..random.random_range(1..30)).map(|_| random.random::<char>()).collect(),
        _ => pick(random, &hostile::names()),
    }
}

fn headers(random: &mut SmallRng) -> String {
    let object = |pairs: Vec<(String, String)>| {
        serde_json::to_string(&pairs.into_iter().collect::<BTreeMap<_, _>>()).expect("texts are JSON")
    };
    match random.random_range(0..20) {
        0 => {
            pick(random, &["[]", "null", "1", "{\"a\":1}", "{\"a\":{}}", "{\"a b\":\"\"}", "{\"a\":\"\\u0001\"}", "{"])
        }
        1 => object((0..65).map(|n| (format!("h{n}"), String::new())).collect()),
        2 => object(vec![("big".to_owned(), "x".repeat(16 * 1024))]),
        3 => object((0..64).map(|n| (format!("h{n}"), "é".repeat(100))).collect()),
        4..8 => object(vec![(pick(random, &hostile::RESERVED_HEADERS), "forged".to_owned())]),
        _ => object(vec![("h".to_owned(), pick(random, &hostile::header_values()))]),
    }
}

/// Returns a date: now, long ago, far ahead, a moment ahead, or an invalid one.
fn date(random: &mut SmallRng) -> String {
    match random.random_range(0..10) {
        0 => pick(random, &["infinity", "-infinity", "294276-12-31", "no date", "9999-12-31T23:59:59Z"]),
        1 => pick(random, &["4713-01-01 BC", "0001-01-01 BC", "0001-01-01", "1970-01-01", "1900-01-01"]),
        2 => pick(random, &["9999-12-30 22:00:00Z", "2999-01-01", "2038-01-19 03:14:08Z"]),
        3 => (jiff::Timestamp::now() + Duration::from_millis(random.random_range(0..300))).to_string(),
        _ => jiff::Timestamp::now().to_string(),
    }
}

/// What the sink received, and when.
type Arrived = Arc<Mutex<HashMap<EventId, (Event, Instant)>>>;

/// The honest producer: appends one event after the other until the end. Returns each with the time
/// of its commit.
async fn honest(client: Client, end: Arc<tokio::sync::Notify>) -> Vec<(EventId, Instant)> {
    let (mut sent, mut pace, mut ended) = (Vec::new(), tokio::time::interval(PACE), std::pin::pin!(end.notified()));
    loop {
        tokio::select! {
            biased;
            () = &mut ended => return sent,
            _ = pace.tick() => {}
        }
        let id = EventId::now_v7();
        let (uuid, key) = (id.as_uuid(), (sent.len() % 2 == 0).then_some(KEY));
        let params: [(&(dyn ToSql + Sync), Type); 2] = [(&uuid, Type::UUID), (&key, Type::TEXT)];
        let sql = format!("SELECT postbox.enqueue('{TOPIC}', '{{}}', id => $1, key => $2)");
        client.query_typed(&sql, &params).await.expect("appended");
        sent.push((id, Instant::now()));
    }
}

async fn store(url: &str) -> PostgresStore {
    PostgresStore::connect(PostgresConfig::new(url)).await.expect("connected")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hostile_producer_delays_and_loses_nobody() {
    let seed = std::env::var("POSTBOX_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| SmallRng::from_os_rng().random());
    println!("POSTBOX_SEED={seed}");
    let fixture = support::on(Version::V15).await;
    let owner = fixture.client().await;
    let [writer, relay] = ["writer", "relay"].map(|name| format!("hostile_{name}_{}", std::process::id()));
    owner.batch_execute(&format!("CREATE ROLE {writer} LOGIN; CREATE ROLE {relay} LOGIN")).await.expect("roles");
    let roles = Roles { writers: vec![writer.clone()], relays: vec![relay.clone()], ..Roles::default() };
    owner.batch_execute(&fixture.store.grants(&roles).await.expect("printed")).await.expect("granted");

    let arrived = Arrived::default();
    let seen = Arc::clone(&arrived);
    let sink = handler_sink(move |delivery: Delivery| {
        let now = Instant::now();
        seen.lock().expect("no panic while it is held").entry(delivery.event.id).or_insert((delivery.event, now));
        std::future::ready(())
    });
    let name = SubscriptionName::new("out").expect("a name");
    let subscription = Subscription { lanes: Some(1), ..Subscription::new(name.clone(), LogName::outbox()) };
    let working = Arc::new(store(&url_as(&fixture.url, &relay)).await);
    let running = Relay::builder(working.clone(), subscription).sink(Arc::new(sink)).build().expect("built");
    let stop = CancellationToken::new();
    let running = tokio::spawn({
        let stop = stop.clone();
        async move { running.run(stop).await }
    });

    let end = Arc::new(tokio::sync::Notify::new());
    let writer_url = url_as(&fixture.url, &writer);
    let others = tokio::spawn(honest(support::client(&writer_url).await, end.clone()));
    // One of the hostile transactions stays open during the whole test.
    let open = support::client(&writer_url).await;
    open.batch_execute("BEGIN; INSERT INTO postbox.outbox (topic, payload) VALUES ('open', '1')").await.expect("open");
    let mut writing = Vec::new();
    for n in 0..WRITERS {
        let (client, mut random) =
            (support::client(&writer_url).await, SmallRng::seed_from_u64(seed.wrapping_add(n as u64)));
        writing.push(tokio::spawn(async move {
            let mut rows = Vec::new();
            for _ in 0..ROWS / WRITERS {
                let id = EventId::from_uuid(uuid::Builder::from_random_bytes(random.random()).into_uuid());
                let row = Row::random(&mut random, id);
                match row.insert(&client).await {
                    Ok(_) => rows.push((id, row)),
                    Err(error) => {
                        let state = error.code().map_or("", |state| state.code()).to_owned();
                        // An invalid value, or a rule of the event: nothing in the store failed.
                        assert!(["22", "23"].contains(&state.get(..2).unwrap_or("")), "{error:?} {:?}", row.columns);
                    }
                }
            }
            rows
        }));
    }
    let mut rows = Vec::new();
    for wrote in writing {
        rows.extend(wrote.await.expect("written"));
    }
    end.notify_one();
    let others = others.await.expect("appended");
    open.batch_execute("COMMIT").await.expect("committed");
    println!("{} of {ROWS} rows came in beside {} events of others", rows.len(), others.len());
    assert!(rows.len() > ROWS / 3, "most were refused: the test is none");

    // Events that were scheduled for a moment ahead are delivered by then, too.
    let near = "SELECT count(*) FROM postbox.delivery WHERE state IN ('retrying', 'blocked') \
                OR (state = 'scheduled' AND due_at < clock_timestamp() + interval '1 minute')";
    let settled = async {
        while working.stats(&name).await.is_ok_and(|stats| stats.pending > stats.scheduled)
            || owner.query_one(near, &[]).await.expect("asked").get::<_, i64>(0) > 0
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, settled).await.expect("all is delivered, dead or for later");
    stop.cancel();
    running.await.expect("ended").expect("stopped");
    check(&owner, &arrived, &rows, &others).await;
    owner
        .batch_execute(&format!("DROP OWNED BY {writer}, {relay}; DROP ROLE {writer}, {relay}"))
        .await
        .expect("cleaned up");
}

async fn check(owner: &Client, arrived: &Arrived, rows: &[(EventId, Row)], others: &[(EventId, Instant)]) {
    let arrived = arrived.lock().expect("no panic while it is held").clone();
    let late = others.iter().filter_map(|(id, sent)| {
        let took = arrived.get(id).map_or(Duration::MAX, |(_, at)| at.saturating_duration_since(*sent));
        (took > LATE).then_some(took)
    });
    let late: Vec<Duration> = late.collect();
    assert!(late.is_empty(), "{} of {} events of others were late or lost: {late:?}", late.len(), others.len());
    let log = "SELECT l.id, (extract(epoch FROM l.occurred_at) * 1000000)::text, coalesce(d.state, ''), coalesce(d.code, ''), \
               coalesce(l.deliver_at > clock_timestamp(), false) \
               FROM postbox.outbox AS l LEFT JOIN postbox.delivery AS d ON d.seq = l.seq";
    let written: HashMap<EventId, &Row> = rows
        .iter()
        .map(|(_, row)| {
            let id = row.columns[0].as_deref().expect("each names one").parse().expect("an id");
            (id, row)
        })
        .collect();
    let (mut dead, mut later) = (0, 0);
    for row in owner.query(log, &[]).await.expect("read") {
        let (id, occurred_at): (_, String) = (EventId::from_uuid(row.get(0)), row.get(1));
        let (state, code): (&str, &str) = (row.get(2), row.get(3));
        match (arrived.get(&id), state) {
            (Some((event, _)), "") => {
                assert!(
                    occurred_at.starts_with(&event.occurred_at.as_microsecond().to_string()),
                    "{id}: {occurred_at} {event:?}"
                );
                assert!(written.get(&id).is_none_or(|row| row.is(event)), "{id} arrived as another: {event:?}");
            }
            (None, "dead") if !code.is_empty() => dead += 1,
            (None, "scheduled") if row.get::<_, bool>(4) => later += 1,
            (arrived, _) => {
                panic!("{id}: {state} {code}, arrived: {arrived:?}, {:?}", written.get(&id).map(|row| &row.columns))
            }
        }
    }
    println!("{dead} dead, {later} for later, {} delivered", arrived.len());
}
