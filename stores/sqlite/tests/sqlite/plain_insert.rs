//! Rows that other programs insert: defaults, refusals by name, and rows that only a reader can
//! check.

use postbox_core::{
    Admin as _, Batch, BatchLimit, Change, Criteria, Disposition, Entry, Filter, Headers, Inspect, Lease, ListQuery,
    Log, LogName, Maintain as _, NewEvent, Selection, Settlement, State, Store as _, Subscription, SubscriptionName,
};
use rusqlite::types::Value;
use rusqlite::{Connection, params};

use crate::common::{self, fixture};

fn insert(connection: &Connection, column: &str, value: impl Into<Value>) -> Result<usize, String> {
    let (topic, payload) = (Value::from("t".to_owned()), Value::from("{}".to_owned()));
    let value = value.into();
    let result = match column {
        "topic" => {
            connection.execute("INSERT INTO postbox_outbox (topic, payload) VALUES (?1, ?2)", params![value, payload])
        }
        "payload" => {
            connection.execute("INSERT INTO postbox_outbox (topic, payload) VALUES (?1, ?2)", params![topic, value])
        }
        _ => connection.execute(
            &format!("INSERT INTO postbox_outbox (topic, payload, {column}) VALUES (?1, ?2, ?3)"),
            params![topic, payload, value],
        ),
    };
    result.map_err(|error| error.to_string())
}

#[tokio::test]
async fn an_insert_of_topic_and_payload_is_a_whole_event() {
    let fixture = fixture().await;
    let before = jiff::Timestamp::now();
    let connection = fixture.connect();
    for n in 0..100 {
        connection
            .execute(
                "INSERT INTO postbox_outbox (topic, key, payload) VALUES ('order.paid', '42', ?1)",
                [format!("{{\"n\":{n}}}")],
            )
            .expect("inserted");
    }
    let lease = fixture.lane().await;
    let batch = fixture.next(&lease).await;
    assert_eq!(batch.deliveries.len(), 100);
    for (n, delivery) in batch.deliveries.iter().enumerate() {
        let event = &delivery.event;
        assert_eq!(event.payload, format!("{{\"n\":{n}}}").into_bytes());
        assert_eq!((event.kind(), event.content_type()), ("domain", "application/json"));
        let id = event.id.as_uuid();
        assert_eq!((id.get_version_num(), id.get_variant()), (7, uuid::Variant::RFC4122));
        let (seconds, _) = id.get_timestamp().expect("a time").to_unix();
        assert!(seconds.abs_diff(before.as_second().unsigned_abs()) < 60, "the id's time is now");
        assert!(event.created_at.duration_since(before).abs() < jiff::SignedDuration::from_secs(60));
        assert_eq!(event.occurred_at, event.created_at);
    }
}

#[tokio::test]
async fn payloads_are_delivered_as_the_bytes_inserted() {
    let fixture = fixture().await;
    let connection = fixture.connect();
    connection
        .execute_batch(
            "INSERT INTO postbox_outbox (topic, payload) VALUES ('t', x'00FF80'), ('t', ''), ('t', x''), \
             ('t', 'a' || char(0) || 'b'), ('t', CAST(x'FFC080' AS TEXT)), ('t', '1e400')",
        )
        .expect("inserted");
    let lease = fixture.lane().await;
    let payloads: Vec<Vec<u8>> =
        fixture.next(&lease).await.deliveries.iter().map(|delivery| delivery.event.payload.to_vec()).collect();
    let expected: [&[u8]; 6] = [&[0, 255, 128], b"", b"", b"a\0b", &[0xff, 0xc0, 0x80], b"1e400"];
    assert_eq!(payloads, expected);
}

#[tokio::test]
async fn times_may_be_microseconds_or_text() {
    let fixture = fixture().await;
    let connection = fixture.connect();
    for at in [
        Value::from(1_700_000_000_123_456_i64),
        Value::from("2023-11-14 22:13:20".to_owned()),
        Value::from("2023-11-14T22:13:20.250Z".to_owned()),
        Value::from("2023-11-14T23:13:20.250+01:00".to_owned()),
    ] {
        insert(&connection, "deliver_at", at.clone()).expect("accepted");
        insert(&connection, "expires_at", at).expect("accepted");
    }
    let lease = fixture.lane().await;
    let batch = fixture.next(&lease).await;
    let events = || batch.deliveries.iter().map(|delivery| &delivery.event);
    let (later, ends): (Vec<_>, Vec<_>) =
        (events().filter_map(|it| it.deliver_at).collect(), events().filter_map(|it| it.expires_at).collect());
    assert_eq!(
        later.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["2023-11-14T22:13:20.123456Z", "2023-11-14T22:13:20Z", "2023-11-14T22:13:20.25Z", "2023-11-14T22:13:20.25Z"]
    );
    assert_eq!(later, ends);
    assert_eq!(batch.expires.len(), ends.len());
}

#[tokio::test]
async fn a_constraint_bears_the_code_that_validate_gives() {
    let fixture = fixture().await;
    let connection = fixture.connect();
    let text = |text: &str| Value::from(text.to_owned());
    let cases: Vec<(&str, Value, &str)> = vec![
        ("topic", text(""), "topic_empty"),
        ("topic", text(&"ż".repeat(128)), "topic_too_long"),
        ("topic", text("a b"), "topic_invalid"),
        ("topic", text("a\nb"), "topic_invalid"),
        ("topic", text("a\u{a0}b"), "topic_invalid"),
        ("topic", text("a\u{2028}b"), "topic_invalid"),
        ("topic", text("a\u{3000}b"), "topic_invalid"),
        ("topic", text("a\u{85}b"), "topic_invalid"),
        ("topic", text("a\0b"), "topic_invalid"),
        ("topic", text("\0"), "topic_invalid"),
        ("topic", Value::from(b"blob".to_vec()), "topic_invalid"),
        ("key", text(""), "key_empty"),
        ("key", text(&"k".repeat(1025)), "key_too_long"),
        ("key", text("a\0b"), "key_invalid"),
        ("key", Value::from(b"blob".to_vec()), "key_invalid"),
        ("tenant", text(""), "tenant_empty"),
        ("tenant", text(&"t".repeat(129)), "tenant_too_long"),
        ("tenant", text("a\tb"), "tenant_invalid"),
        ("kind", text(""), "kind_invalid"),
        ("kind", text("\u{7f}"), "kind_invalid"),
        ("aggregate", text(&"a".repeat(129)), "aggregate_invalid"),
        ("source", text("a\rb"), "source_invalid"),
        ("content_type", text("a\0"), "content_type_invalid"),
        ("version", text("one"), "version_invalid"),
        ("payload", Value::from(1_i64), "payload_invalid"),
        ("payload", Value::from(vec![0_u8; 16 * 1024 * 1024 + 1]), "payload_too_large"),
        ("id", text("42"), "event_id_invalid"),
        ("id", text("01990000-0000-7000-8000-000000000000\0x"), "event_id_invalid"),
        ("headers", text("[]"), "headers_invalid"),
        ("headers", text("{"), "headers_invalid"),
        ("headers", text("{\"a\":\"x\\r\\nb: y\"}"), "header_value_invalid"),
        ("headers", text("{\"a\":\"\\u0000\"}"), "header_value_invalid"),
        ("headers", text("{\"a\":\"\\\\\\n\"}"), "header_value_invalid"),
        ("headers", text(&format!("{{\"a\":\"{}\"}}", "x".repeat(131_073))), "headers_too_large"),
        ("deliver_at", text("tomorrow"), "deliver_at_invalid"),
        ("deliver_at", Value::from(i64::MAX), "deliver_at_invalid"),
        ("deliver_at", text("9999-12-31 23:00:00"), "deliver_at_invalid"),
        ("deliver_at", text("1969-12-31 23:59:59"), "deliver_at_invalid"),
        ("expires_at", text("tomorrow"), "expires_at_invalid"),
        ("expires_at", text("-4000-01-01 00:00:00"), "expires_at_invalid"),
        ("expires_at", Value::from(-1), "expires_at_invalid"),
        ("occurred_at", Value::from(-62_135_596_800_000_001_i64), "occurred_at_invalid"),
        ("occurred_at", Value::from(0.5), "occurred_at_invalid"),
        ("created_at", text("now"), "created_at_invalid"),
        ("created_at", Value::from(i64::MIN), "created_at_invalid"),
        ("created_at", Value::from(f64::INFINITY), "created_at_invalid"),
    ];
    for (column, value, code) in cases {
        let error = insert(&connection, column, value.clone()).expect_err(code);
        assert_eq!(error, format!("CHECK constraint failed: {code}"), "{column} {:?}", short(&value));
    }
    // Whichever notation each of the two times has.
    for (later, ends) in [
        ("1700000000000000", "1700000000000000"),
        ("'2023-11-14 22:13:20'", "'2023-11-14 22:13:20'"),
        ("'2023-11-14 22:13:20'", "1699999999000000"),
        ("1700000000000000", "'2023-11-14 22:13:19'"),
    ] {
        let columns = "INSERT INTO postbox_outbox (topic, payload, deliver_at, expires_at)";
        let error = connection.execute_batch(&format!("{columns} VALUES ('t', '', {later}, {ends})")).expect_err(ends);
        assert_eq!(error.to_string(), "CHECK constraint failed: expires_too_early", "{later} {ends}");
    }
    // Values that only look forbidden.
    insert(&connection, "headers", text("{\"path\":\"C:\\\\new\\\\table\", \"t\":\"a\\tb\"}"))
        .expect("escaped backslashes");
    insert(&connection, "headers", text("{\n  \"pretty\": \"printed\"\n}")).expect("white space between tokens");
    insert(&connection, "key", text("any thing\n")).expect("keys may have white space");
    let lease = fixture.lane().await;
    let batch = fixture.next(&lease).await;
    assert_eq!(batch.deliveries[0].event.header("path"), Some("C:\\new\\table"));
    assert_eq!(batch.deliveries[1].event.header("pretty"), Some("printed"));
    assert_eq!(batch.deliveries.len(), 3, "refused rows are not there");
}

fn short(value: &Value) -> String {
    format!("{value:?}").chars().take(60).collect()
}

/// `OR IGNORE` drops whatever breaks a rule.
#[tokio::test]
async fn on_conflict_of_the_id_appends_once_and_still_refuses() {
    let fixture = fixture().await;
    let connection = fixture.connect();
    let insert = |or: &str, key: &str, once: &str| {
        let id = "01990000-0000-7000-8000-000000000000";
        let sql =
            format!("INSERT {or} INTO postbox_outbox (id, topic, key, payload) VALUES (?1, 't', ?2, '{{}}') {once}");
        connection.execute(&sql, [id, key]).map_err(|error| error.to_string())
    };
    let (once, too_long) = ("ON CONFLICT (id) DO NOTHING", "k".repeat(1_025));
    assert_eq!(insert("OR IGNORE", &too_long, ""), Ok(0), "dropped in silence");
    assert_eq!(insert("", &too_long, once), Err("CHECK constraint failed: key_too_long".to_owned()));
    assert_eq!(insert("", "k", once), Ok(1));
    assert_eq!(insert("", "k", once), Ok(0));
}

#[tokio::test]
async fn sql_refuses_exactly_what_validate_refuses() {
    let fixture = fixture().await;
    let connection = fixture.connect();
    // In one transaction, to avoid 17,000 flushes.
    connection.execute_batch("BEGIN").expect("begun");
    // Every character up to the end of the general punctuation block, and some odd ones.
    let odd = ['\u{3000}', '\u{feff}', '\u{fffd}', '\u{10ffff}'];
    for c in ('\u{1}'..'\u{2100}').chain(odd) {
        let topic = format!("a{c}b");
        let in_rust = NewEvent::json(topic.as_str(), "").validate().is_ok();
        let in_sql = insert(&connection, "topic", topic.clone()).is_ok();
        assert_eq!(in_sql, in_rust, "topic with U+{:04X}", c as u32);
        let in_rust = NewEvent::json("t", "").tenant(topic.as_str()).validate().is_ok();
        assert_eq!(insert(&connection, "tenant", topic).is_ok(), in_rust, "tenant with U+{:04X}", c as u32);
    }
}

#[tokio::test]
async fn a_row_that_only_a_reader_can_judge_is_dead_at_once_and_its_neighbours_flow_on() {
    let fixture = fixture().await;
    let connection = fixture.connect();
    connection
        .execute_batch(
            "INSERT INTO postbox_outbox (topic, key, payload, headers) VALUES ('first', 'k', '1', NULL); \
             INSERT INTO postbox_outbox (topic, key, payload) VALUES (CAST(x'61FF' AS TEXT), 'k', '2'); \
             INSERT INTO postbox_outbox (topic, key, payload) VALUES ('t', CAST(x'C3' AS TEXT), '3'); \
             INSERT INTO postbox_outbox (topic, key, payload, headers) VALUES ('t', 'k', '4', '{\"a\":1}'); \
             INSERT INTO postbox_outbox (topic, key, payload, headers) VALUES ('t', 'k', '5', '{\"a b\":\"1\"}'); \
             INSERT INTO postbox_outbox (topic, key, payload, headers) VALUES ('t', 'k', '6', '{\"a\":{\"b\":\"c\"}}'); \
             INSERT INTO postbox_outbox (topic, key, payload) VALUES ('last', 'k', '7');",
        )
        .expect("inserted");
    let many: String = (0..65).map(|n| format!("\"h{n}\":\"\",")).collect();
    insert(&connection, "headers", format!("{{{}}}", many.trim_end_matches(','))).expect("accepted");
    let lease = fixture.lane().await;
    let batch = fixture.next(&lease).await;
    let topics: Vec<&str> = batch
        .deliveries
        .iter()
        .filter(|delivery| !batch.unreadable.contains_key(&delivery.seq))
        .map(|delivery| delivery.event.topic.as_str())
        .collect();
    assert_eq!(topics, ["first", "last"]);
    settle_unreadable(&fixture, &lease, &batch).await;
    let name = SubscriptionName::new("reader").expect("valid");
    let query = ListQuery {
        subscription: name.clone(),
        state: Some(State::Dead),
        which: Criteria::default(),
        code: None,
        headers: Headers::new(),
        after: None,
        limit: 10,
        payloads: true,
    };
    let dead = fixture.store.list(&query).await.expect("listed");
    let codes: Vec<&str> = dead.iter().map(|record| record.code.as_deref().expect("a code")).collect();
    let expected = [
        "row_undecodable",
        "row_undecodable",
        "headers_invalid",
        "header_name_invalid",
        "headers_invalid",
        "headers_too_many",
    ];
    assert_eq!(codes, expected);
    // A retry does not help, and does no harm.
    assert_eq!(fixture.store.change(&name, &Change::Retry, &Selection::default()).await.expect("asked").count, 6);
    let due = fixture.store.due(&lease, BatchLimit::default()).await.expect("read");
    assert_eq!((due.deliveries.len(), due.unreadable.len()), (6, 6), "nothing of them is sent");
    settle_unreadable(&fixture, &lease, &due).await;
    let stats = fixture.store.stats(&name).await.expect("counted");
    assert_eq!((stats.pending, stats.dead, stats.dispatched), (0, 6, 2));
}

/// SQLite accepts them as JSON.
#[tokio::test]
async fn headers_that_cannot_be_parsed_are_not_skipped_by_a_filter_for_headers() {
    let fixture = fixture().await;
    let connection = fixture.connect();
    let nested = format!("{{\"a\":{}{}}}", "[".repeat(200), "]".repeat(200));
    let texts = ["{\"region\":\"\\ud83d\"}", "{\"a\":1e999}", nested.as_str()];
    for headers in texts.into_iter().chain(["{\"region\":\"us\"}", "{\"region\":\"eu\"}"]) {
        insert(&connection, "headers", headers.to_owned()).expect("accepted");
    }
    let headers = Headers::from([("region".to_owned(), "eu".to_owned())]);
    let lease = fixture.lane_for(Filter { headers, ..Filter::default() }).await;
    let batch = fixture.next(&lease).await;
    let places: Vec<i64> = batch.deliveries.iter().map(|delivery| delivery.seq.0).collect();
    assert_eq!(places, [1, 2, 3, 5]);
    let codes: Vec<&str> = batch.unreadable.values().map(|why| &*why.code).collect();
    assert_eq!(codes, ["headers_invalid"; 3]);
}

/// An earlier version passed such an event without reading it, and kept it as unrouted.
#[tokio::test]
async fn headers_that_an_earlier_version_skipped_are_read_when_the_filter_changes() {
    let fixture = fixture().await;
    let connection = fixture.connect();
    insert(&connection, "headers", "{\"a\":1e999}".to_owned()).expect("accepted");
    let of_region =
        |region: &str| Filter { headers: Headers::from([("region".into(), region.into())]), ..Filter::default() };
    let lease = fixture.lane_for(of_region("eu")).await;
    let batch = fixture.next(&lease).await;
    fixture.settle(&lease, &batch).await;
    connection.execute("INSERT INTO postbox_unrouted (log, seq) VALUES ('outbox', 1)", []).expect("kept");
    let changed = Subscription {
        filter: of_region("us"),
        lanes: Some(1),
        ..Subscription::new(lease.subscription.clone(), LogName::outbox())
    };
    fixture.store.subscribe(&changed).await.expect("subscribed");
    // The lane takes the filter over.
    fixture.next(&lease).await;
    while fixture.store.note_unrouted(&LogName::outbox()).await.expect("noted").more {}
    let due = fixture.store.due(&lease, BatchLimit::default()).await.expect("read");
    assert_eq!(due.unreadable.values().map(|why| &*why.code).collect::<Vec<_>>(), ["headers_invalid"]);
}

/// Settles a batch as a relay does: events that cannot be read are dead, the others delivered.
async fn settle_unreadable(fixture: &common::Fixture, lease: &Lease, batch: &Batch) {
    let mut entries = Vec::new();
    for delivery in &batch.deliveries {
        let why = batch.unreadable.get(&delivery.seq);
        entries.push(Entry { delivery, disposition: why.map_or(Disposition::Delivered, |why| why.disposition()) });
    }
    let settlement = Settlement { position: batch.end, entries, rewind: false, hold_keys: true };
    fixture.store.settle(lease, settlement).await.expect("settled");
}
