//! The views and functions for people and programs that do not use the binary.

use std::time::Duration;

use postbox_core::limits::CHANGE_EVENTS_MAX;
use postbox_core::{
    Admin as _, Append as _, Batch, BatchLimit, Change, Disposition, Entry, EventId, Inbound, Inspect as _, Lease,
    Log as _, LogName, NewEvent, OwnerId, Pause, Receive as _, Selection, Settlement, SourceName, Store as _,
    Subscription, SubscriptionName,
};
use postbox_postgres::PostgresStore;
use postbox_testkit::servers::Version;
use tokio_postgres::Client;
use tokio_postgres::error::DbError;

use crate::support::{self, Fixture};

const LONG: Duration = Duration::from_secs(600);

fn reader() -> SubscriptionName {
    SubscriptionName::new("reader").expect("a name")
}

fn id(n: u8) -> EventId {
    format!("00000000-0000-7000-8000-0000000000{n:02}").parse().expect("an id")
}

fn event(n: u8, key: &str) -> NewEvent {
    NewEvent { id: Some(id(n)), ..NewEvent::json("order.placed", n.to_string()).key(key) }
}

/// A log of nine events in every state that has something to change, the last one unread:
///
/// 1 retrying, 2 and 3 behind it; 4 dead, and holds 5; 6 dead; 7 scheduled; 8 delivered; 9 pending.
async fn filled(version: Version) -> (Fixture, Client, Lease) {
    let fixture = support::on(version).await;
    let (store, client) = (&fixture.store, fixture.client().await);
    store
        .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(reader(), LogName::outbox()) })
        .await
        .expect("subscribed");
    let owner = OwnerId::new("test").expect("a name");
    let lease = store.acquire(&reader(), &owner, &[], LONG).await.expect("asked").lease.expect("free");
    let keys = ["a", "a", "a", "b", "b", "c", "d", "e", "f"];
    let events: Vec<NewEvent> = (1..).zip(keys).map(|(n, key)| event(n, key)).collect();
    store.append(&LogName::outbox(), &events[..8]).await.expect("appended");
    let batch = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    let dead = |halt| Disposition::Dead { code: "http_422".into(), error: "never".into(), halt, took: None };
    let retry =
        Disposition::Retry { after: LONG, counted: true, code: "http_500".into(), error: "no".into(), took: None };
    let at = "2100-01-01T00:00:00Z".parse().expect("a time");
    let block = || Disposition::Block;
    settle(
        store,
        &lease,
        &batch,
        vec![retry, block(), block(), dead(true), block(), dead(false), Disposition::Schedule { at }],
    )
    .await;
    store.append(&LogName::outbox(), &events[8..]).await.expect("appended");
    (fixture, client, lease)
}

async fn settle(store: &PostgresStore, lease: &Lease, batch: &Batch, dispositions: Vec<Disposition>) {
    let entry = |(delivery, disposition)| Entry { delivery, disposition };
    let entries = batch.deliveries.iter().zip(dispositions).map(entry).collect();
    let settlement = Settlement { position: batch.end, entries, rewind: false, hold_keys: true };
    store.settle(lease, settlement).await.expect("settled");
}

/// Returns everything that an operation may change, except times.
async fn rows(client: &Client) -> Vec<String> {
    let mut rows = Vec::new();
    for (what, columns, order) in [
        ("subscription", "name, replays, paused_by, paused_why, paused_until", "id"),
        ("lane", "subscription, lane, last_seq, delivered", "subscription, lane"),
        (
            "delivery",
            "seq, lane, key, state, ordered, halt, holds, attempts, replays, crashes, due_at IS NULL, due_at < now(), code, error, letters, letter_at",
            "seq",
        ),
        ("once", "source, message_id", "source, message_id"),
        ("receipt", "source, tenant, message_id, digest", "source, tenant, message_id"),
        ("conflict", "source, message_id, digest_stored, digest_refused, times", "message_id, digest_refused"),
        ("inbox", "seq, topic, key, source, tenant, payload, payload_bytes, content_type, headers", "seq"),
    ] {
        let sql = format!("SELECT '{what} ' || (row({columns}))::text FROM postbox.{what} ORDER BY {order}");
        rows.extend(client.query(&sql, &[]).await.expect(&sql).iter().map(|row| row.get::<_, String>(0)));
    }
    rows
}

fn of(ids: &[u8]) -> Selection {
    Selection { ids: Some(ids.iter().map(|n| id(*n)).collect()), ..Selection::default() }
}

async fn call(client: &Client, sql: &str) -> String {
    client
        .query_one(&format!("SELECT ({sql})::text"), &[])
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error:?}"))
        .get(0)
}

async fn change(client: &Client, action: &str, ids: &[u8]) -> u64 {
    let ids: Vec<String> = ids.iter().map(|n| format!("'{}'", id(*n))).collect();
    let why = if action == "mark_dead" { "'so'," } else { "" };
    call(client, &format!("postbox.{action}('reader', {why} {})", ids.join(", "))).await.parse().expect("a number")
}

/// Runs each operation once through the store's contract and once as a function, on equal logs.
/// Both return the same and leave the same rows.
#[tokio::test]
async fn a_function_does_what_the_store_does() {
    for version in Version::ALL {
        let ((by_store, looks, _a), (_b, client, _c)) = (filled(version).await, filled(version).await);
        let store = &by_store.store;
        for (action, ids) in [
            ("retry", &[8, 9][..]),
            // The head of a key that holds two more, then one that is behind it.
            ("retry", &[1]),
            ("discard", &[2]),
            ("discard", &[1]),
            // A dead event that holds its key, a dead one that holds nothing, and that one again.
            ("discard", &[4]),
            ("retry", &[6]),
            ("retry", &[6]),
            // An event behind the head, then the head, then the dead one.
            ("mark_dead", &[3]),
            ("retry", &[3]),
            ("mark_dead", &[3, 3, 4]),
            // Scheduled, pending, delivered and unknown events.
            ("mark_dead", &[9, 77]),
            ("retry", &[9]),
            ("discard", &[7, 9, 8, 77]),
            ("discard", &[7, 9]),
        ] {
            let asked = match action {
                "retry" => Change::Retry,
                "discard" => Change::Discard,
                _ => Change::MarkDead { why: Some("so".into()) },
            };
            let expected = store.change(&reader(), &asked, &of(ids)).await.expect("changed").count;
            assert_eq!(change(&client, action, ids).await, expected, "{action} {ids:?}");
            assert_eq!(rows(&client).await, rows(&looks).await, "{action} {ids:?}");
        }
        let until = "2100-01-01T00:00:00Z";
        for (why, until) in [("billing moves", None), ("until then", Some(until))] {
            let pause = Pause { until: until.map(|at| at.parse().expect("a time")), by: "me".into(), why: why.into() };
            store.pause(&reader(), Some(&pause)).await.expect("paused");
            let until = until.map_or("NULL".to_owned(), |until| format!("'{until}'"));
            call(&client, &format!("postbox.pause('reader', '{why}', {until}, by => 'me')")).await;
            assert_eq!(rows(&client).await, rows(&looks).await);
        }
        store.pause(&reader(), None).await.expect("resumed");
        call(&client, "postbox.resume('reader')").await;
        assert_eq!(rows(&client).await, rows(&looks).await);
        for (message, body, said) in
            [("m1", "{}", "accepted"), ("m1", "{}", "duplicate"), ("m1", "[]", "conflict"), ("m2", "\\x41", "accepted")]
        {
            let digest = call(&client, &format!("encode(sha256(convert_to('{body}', 'UTF8')), 'hex')")).await;
            let digest = (0..32).map(|at| u8::from_str_radix(&digest[2 * at..2 * at + 2], 16).expect("hex"));
            let inbound = Inbound {
                source: SourceName::new("stripe").expect("a name"),
                message_id: message.into(),
                digest: digest.collect::<Vec<u8>>().try_into().expect("32 bytes"),
                event: NewEvent { source: Some("stripe".into()), content_type: None, ..NewEvent::json("paid", body) }
                    .key("k")
                    .tenant("acme")
                    .header(postbox_core::header::MESSAGE_ID, message),
            };
            store.receive(&LogName::inbox(), inbound).await.expect("received");
            let sql = format!("postbox.receive('stripe', '{message}', 'paid', '{body}', key => 'k', tenant => 'acme')");
            assert_eq!(call(&client, &sql).await, said);
            assert_eq!(rows(&client).await, rows(&looks).await, "{body}");
        }
    }
}

/// A message's work and the mark that it is done commit in one transaction.
#[tokio::test]
async fn once_is_true_once_and_rolls_back_with_its_transaction() {
    let fixture = support::on(Version::V15).await;
    let client = fixture.client().await;
    let once = "postbox.once('stripe', 'm1')";
    client.batch_execute("BEGIN").await.expect("begun");
    assert_eq!(call(&client, once).await, "true");
    client.batch_execute("ROLLBACK").await.expect("rolled back");
    assert_eq!(call(&client, once).await, "true");
    assert_eq!(call(&client, once).await, "false");
    assert_eq!(call(&client, "postbox.once('other', 'm1')").await, "true");
    // A message that was received has not been applied.
    call(&client, "postbox.receive('stripe', 'm2', 'paid', '\\x00ff'::bytea)").await;
    assert_eq!(call(&client, "postbox.once('stripe', 'm2')").await, "true");
    let stored = "(SELECT payload_bytes::text || coalesce(content_type, '') FROM postbox.inbox)";
    assert_eq!(call(&client, stored).await, r"\x00ffapplication/octet-stream");
}

/// A setting that one call needs does not outlast the call.
#[tokio::test]
async fn a_receive_leaves_the_callers_settings_alone() {
    let fixture = support::on(Version::V15).await;
    let client = fixture.client().await;
    client.batch_execute("SET lock_timeout = '7s'; SET synchronous_commit = off; BEGIN").await.expect("set");
    call(&client, "postbox.receive('stripe', 'm1', 'paid', '{}')").await;
    assert_eq!(call(&client, "current_setting('lock_timeout')").await, "7s");
    // The sender is answered that the message is stored, so it must be on disk.
    assert_eq!(call(&client, "current_setting('synchronous_commit')").await, "on");
    client.batch_execute("COMMIT").await.expect("committed");
    assert_eq!(call(&client, "current_setting('synchronous_commit')").await, "off");
}

/// A subquery that finds no ids passes NULL.
#[tokio::test]
async fn no_ids_are_none_and_never_all() {
    let (_fixture, client, _lease) = filled(Version::V15).await;
    let before = rows(&client).await;
    for action in ["retry('reader'", "discard('reader'", "mark_dead('reader', 'why'"] {
        for ids in ["(SELECT array_agg(id) FROM postbox.outbox WHERE false)", "'{}'::uuid[]"] {
            assert_eq!(call(&client, &format!("postbox.{action}, VARIADIC {ids})")).await, "0");
        }
    }
    assert_eq!(rows(&client).await, before);
    // The guide recommends this way to retry everything that a query finds.
    let all = "postbox.retry('reader', VARIADIC ARRAY(SELECT id FROM postbox.outbox_dead WHERE code = 'http_422'))";
    assert_eq!(call(&client, all).await, "2");
}

async fn refused(client: &Client, sql: &str) -> DbError {
    let error = client.batch_execute(&format!("SELECT {sql}")).await.expect_err(sql);
    error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error:?}")).clone()
}

/// Refusals say what was refused, why and how to fix it, with the value and the limit.
#[tokio::test]
async fn refusals_say_what_why_and_the_cure() {
    let (_fixture, client, _lease) = filled(Version::V15).await;
    let many = format!("VARIADIC ARRAY(SELECT gen_random_uuid() FROM generate_series(0, {CHANGE_EVENTS_MAX}))");
    for (sql, rule, hint) in [
        ("postbox.pause('raeder', 'why')", "PB002", "known: reader"),
        ("postbox.resume('raeder')", "PB002", "known: reader"),
        ("postbox.retry('raeder', gen_random_uuid())", "PB002", "known: reader"),
        ("postbox.discard('raeder', gen_random_uuid())", "PB002", "known: reader"),
        ("postbox.mark_dead('raeder', NULL, gen_random_uuid())", "PB002", "known: reader"),
        (&format!("postbox.retry('reader', {many})"), "too_many_ids", "at most 1000 at a time"),
        (&format!("postbox.discard('reader', {many})"), "too_many_ids", "at most 1000 at a time"),
        ("postbox.pause('reader', 'why', 'infinity')", "until_invalid", "leave it out"),
        ("postbox.pause('reader', 'why', '-infinity')", "until_past", "use resume"),
        ("postbox.pause('reader', 'why', now())", "until_past", "use resume"),
        ("postbox.once('a b', 'm')", "name_invalid", "letters, digits"),
        ("postbox.once('a', '')", "message_id_invalid", "1 to 255 bytes"),
        ("postbox.once('a', NULL)", "message_id_invalid", "1 to 255 bytes"),
        ("postbox.once('a', E'a\\nb')", "message_id_invalid", "as the sender wrote it"),
        ("postbox.receive('a', repeat('m', 256), 't', '')", "message_id_invalid", "1 to 255 bytes"),
        ("postbox.receive('', 'm', 't', '')", "name_invalid", "letters, digits"),
        ("postbox.receive('a', 'm', 't', NULL::text)", "payload_missing", "not NULL"),
        ("postbox.receive('a', 'm', NULL, '{}')", "23502", "invoice.paid"),
        ("postbox.receive('a', 'm', 't', '{}', log => 'inbxo')", "42P01", "create_log"),
        ("postbox.enqueue('t', '{\"a\":}')", "payload_not_json", "content_type =>"),
        ("postbox.enqueue('t', 'a', content_type => 'APPLICATION/JSON;a=b')", "payload_not_json", "content_type =>"),
        (
            "postbox.enqueue('t', 'a', content_type => 'application/problem+json; a=b')",
            "payload_not_json",
            "content_type =>",
        ),
        ("postbox.enqueue('t', 'a'::bytea, content_type => 'application/json')", "payload_not_json", "content_type =>"),
        ("postbox.enqueue(repeat('t', 256), '1')", "topic_too_long", "has 256 bytes; at most 255"),
        ("postbox.enqueue('', '1')", "topic_empty", "order.placed"),
        ("postbox.enqueue(NULL, '1')", "23502", "order.placed"),
        ("postbox.enqueue(NULL, '1'::bytea)", "23502", "order.placed"),
        ("postbox.event_id(' ')", "22023", "order-42-paid"),
        ("postbox.enqueue('a b', '1')", "topic_invalid", "no white space"),
        ("postbox.enqueue('t', '1', repeat('k', 1025))", "key_too_long", "has 1025 bytes; at most 1024"),
        ("postbox.enqueue('t', '1', '')", "key_empty", "leave it out"),
        ("postbox.enqueue('t', '1', tenant => repeat('k', 129))", "tenant_too_long", "has 129 bytes; at most 128"),
        ("postbox.enqueue('t', '1', tenant => E'\\n')", "tenant_invalid", "no control characters"),
        ("postbox.enqueue('t', repeat('1', 16777217))", "payload_too_large", "has 16777217 bytes; at most 16777216"),
        ("postbox.enqueue('t', NULL::text)", "payload_missing", "payload_bytes"),
        ("postbox.enqueue('t', '1', deliver_at => 'infinity')", "deliver_at_invalid", "not infinity"),
        ("postbox.enqueue('t', '1', expires_at => '-infinity')", "expires_at_invalid", "not infinity"),
        ("postbox.enqueue('t', '1', expires_at => '4000-01-01 BC')", "expires_at_invalid", "from 1970 to"),
        ("postbox.enqueue('t', '1', deliver_at => '1969-12-31 23:59Z')", "deliver_at_invalid", "from 1970 to"),
        ("postbox.enqueue('t', '1', occurred_at => '0001-12-31 BC')", "occurred_at_invalid", "from the year 1 to"),
        (
            "postbox.enqueue('t', '1', deliver_at => '2031-01-01Z', expires_at => '2031-01-01Z')",
            "expires_too_early",
            "let it end later",
        ),
        ("postbox.enqueue('t', '1', kind => repeat('k', 129))", "kind_invalid", "the kind has 129"),
        ("postbox.enqueue('t', '1', source => repeat('k', 130))", "source_invalid", "the source has 130"),
        ("postbox.enqueue('t', '1', aggregate => repeat('k', 131))", "aggregate_invalid", "the aggregate has 131"),
        ("postbox.enqueue('t', '1', content_type => '')", "content_type_invalid", "the content type has 0"),
        ("postbox.enqueue('t', '1', headers => '[]')", "headers_invalid", "one JSON object"),
    ] {
        let said = refused(&client, sql).await;
        assert_eq!(said.constraint().unwrap_or(said.code().code()), rule, "{sql}: {said:?}");
        assert!(said.hint().is_some_and(|it| it.contains(hint)), "{sql}: {said:?}");
    }
}

/// Many keys are numbers or UUIDs.
#[tokio::test]
async fn enqueue_takes_keys_that_are_numbers_or_uuids() {
    const UUID: &str = "01234567-89ab-7def-8123-456789abcdef";
    let fixture = support::on(Version::V15).await;
    let client = fixture.client().await;
    for (key, expected) in [
        ("42", Some("42")),
        ("-42::smallint", Some("-42")),
        ("9223372036854775807", Some("9223372036854775807")),
        ("'42'", Some("42")),
        (&format!("'{UUID}'::uuid"), Some(UUID)),
        ("NULL", None),
        ("NULL::bigint", None),
    ] {
        for payload in ["'{}'", "'{}'::text", "'{}'::jsonb", "'\\x00'::bytea"] {
            for call in [format!("'t', {payload}, {key}"), format!("topic => 't', key => {key}, payload => {payload}")]
            {
                let sql = format!("SELECT key FROM postbox.outbox WHERE id = postbox.enqueue({call})");
                // A separate statement: the one in `sql` would not see a row that it inserts
                // itself.
                client
                    .batch_execute(&format!("SELECT postbox.enqueue({call})"))
                    .await
                    .unwrap_or_else(|e| panic!("{sql}: {e:?}"));
                let row = client.query_one("SELECT key FROM postbox.outbox ORDER BY seq DESC LIMIT 1", &[]).await;
                assert_eq!(row.expect("read").get::<_, Option<&str>>(0), expected, "{call}");
            }
        }
    }
    let sql = "SELECT postbox.enqueue('t', '\\x00'::bytea, 42), postbox.enqueue('t', '{}'::jsonb, 42, log => 'inbox')";
    client.batch_execute(sql).await.expect("enqueued");
    let types = "SELECT content_type FROM postbox.outbox ORDER BY seq DESC LIMIT 1";
    let row = client.query_one(types, &[]).await.expect("read");
    assert_eq!(row.get::<_, &str>(0), "application/octet-stream");
}

/// The views show the same as the store's calls return.
#[tokio::test]
async fn the_views_say_what_the_store_says() {
    for version in Version::ALL {
        let (fixture, client, _lease) = filled(version).await;
        let store = &fixture.store;
        let early = Subscription {
            lanes: Some(1),
            start: postbox_core::StartAt::Now,
            ..Subscription::new(SubscriptionName::new("late").expect("a name"), LogName::outbox())
        };
        store.subscribe(&early).await.expect("subscribed");
        call(&client, "postbox.discard('reader', '00000000-0000-7000-8000-000000000007')").await;
        call(&client, "postbox.enqueue('t', '{}', log => 'inbox')").await;
        for name in [reader(), early.name.clone()] {
            let mut states = std::collections::BTreeSet::new();
            for n in 1..=9 {
                let record = store.get(&name, id(n)).await.expect("asked").expect("there");
                let sql = "SELECT state, attempts, replays, due_at, code, error, updated_at, topic, key, created_at
                           FROM postbox.outbox_state WHERE subscription = $1 AND id = $2::text::uuid";
                let row = client.query_one(sql, &[&name.as_str(), &id(n).to_string()]).await.expect("seen");
                let seen = (
                    row.get(0),
                    row.get::<_, i32>(1),
                    row.get::<_, i32>(2),
                    row.get(3),
                    row.get(4),
                    row.get(5),
                    row.get(6),
                );
                let (attempts, replays) = (record.attempts as i32, record.replays as i32);
                let expected = (
                    record.state.to_string(),
                    attempts,
                    replays,
                    record.due_at,
                    record.code.clone(),
                    record.error.clone(),
                    record.updated_at,
                );
                assert_eq!(seen, expected, "{name} {n}");
                assert_eq!(row.get::<_, Option<&str>>(8), record.event.key.as_ref().map(|key| key.as_str()));
                states.insert(record.state.to_string());
            }
            assert_eq!(states.len(), if name == reader() { 6 } else { 1 }, "{states:?}");
            let stats = store.stats(&name).await.expect("counted");
            let sql = "SELECT pending, retrying, blocked, scheduled, dead, discarded, dispatched, skipped, estimated, oldest_pending_seconds, lanes, lanes_held, skipped_estimated
                       FROM postbox.stats WHERE subscription = $1";
            let row = client.query_one(sql, &[&name.as_str()]).await.expect("seen");
            let seen: Vec<u64> = (0..8).map(|at| row.get::<_, i64>(at).unsigned_abs()).collect();
            let counts = [
                stats.pending,
                stats.retrying,
                stats.blocked,
                stats.scheduled,
                stats.dead,
                stats.discarded,
                stats.dispatched,
                stats.skipped,
            ];
            let estimated = [row.get(8), row.get(12)];
            assert_eq!((seen, estimated), (counts.to_vec(), [stats.is_estimate, stats.skipped_is_estimate]), "{name}");
            let oldest = row.get::<_, Option<f64>>(9);
            assert_eq!(oldest.is_some(), stats.oldest_pending.is_some());
            assert!(
                oldest.zip(stats.oldest_pending).is_none_or(|(a, b)| a >= 0.0 && (a - b.as_secs_f64()).abs() < 60.0)
            );
            assert_eq!((row.get::<_, i32>(10), row.get::<_, i32>(11)), (1, i32::from(name == reader())));
        }
        let dead = "SELECT id::text, topic, key, attempts, code, error, payload FROM postbox.outbox_dead WHERE subscription = 'reader' ORDER BY id";
        let dead = client.query(dead, &[]).await.expect("seen");
        let seen: Vec<(String, i32, &str, &str, &str)> =
            dead.iter().map(|row| (row.get(0), row.get(3), row.get(4), row.get(5), row.get(6))).collect();
        let expected = |n: u8| (id(n).to_string(), 1, "http_422", "never");
        let expected = [4, 6].map(|n| {
            let (id, attempts, code, error) = expected(n);
            (id, attempts, code, error, if n == 4 { "4" } else { "6" })
        });
        assert_eq!(seen, expected);
        let paused = "(SELECT coalesce(paused_why || ' ' || coalesce(extract(year FROM paused_until)::text, ''), '') FROM postbox.stats WHERE subscription = 'reader')";
        let over = "UPDATE postbox.subscription SET paused_by = 'me', paused_why = 'so', paused_until = '2000-01-01' WHERE name = 'reader'";
        assert_eq!(client.execute(over, &[]).await.expect("set"), 1);
        assert_eq!(call(&client, paused).await, "", "it has ended");
        for (sql, said) in [
            ("postbox.pause('reader', 'it moves', '2100-01-01')", "it moves 2100"),
            ("postbox.pause('reader', 'it moves')", "it moves "),
            ("postbox.resume('reader')", ""),
        ] {
            call(&client, sql).await;
            assert_eq!(call(&client, paused).await, said, "{sql}");
        }
        let expired = "UPDATE postbox.lane SET lease_until = clock_timestamp() WHERE lease_until IS NOT NULL";
        assert_eq!(client.execute(expired, &[]).await.expect("expired"), 1);
        assert_eq!(call(&client, "(SELECT lanes_held FROM postbox.stats WHERE subscription = 'reader')").await, "0");
        let one = "(SELECT string_agg(subscription, ',') FROM postbox.inbox_state)";
        assert_eq!(
            client.query_one(&format!("SELECT {one}"), &[]).await.expect("seen").get::<_, Option<&str>>(0),
            None
        );
    }
}
