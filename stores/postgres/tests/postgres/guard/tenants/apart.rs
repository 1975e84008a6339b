//! What the writer, reader and operator of one tenant can do, and what they cannot.

use std::collections::BTreeSet;
use std::sync::Arc;

use postbox_core::{
    Admin as _, Append as _, BatchLimit, Change, Criteria, Delivery, Diagnose as _, EventId, Find as _, Headers,
    IdPrefix, Inspect as _, ListQuery, Log as _, LogName, Maintain as _, NewEvent, Prune, Receive as _, Received,
    Replay, Selection, State, Store as _, Subscription, Tail as _, Tenant,
};
use postbox_engine::Relay;
use postbox_postgres::PostgresStore;
use postbox_router::handler_sink;
use postbox_testkit::servers::Version;
use tokio_postgres::Client;

use super::world::{READERS, TENANTS, World, inbound, named, reader_of, within};

/// Every table with rows that belong to a tenant.
const TABLES: [&str; 11] = [
    "outbox",
    "inbox",
    "subscription",
    "lane",
    "delivery",
    "filter",
    "receipt",
    "conflict",
    "once",
    "unrouted",
    "sleeper",
];

const VIEWS: [&str; 5] = ["stats", "outbox_state", "outbox_dead", "inbox_state", "inbox_dead"];

fn state(error: &tokio_postgres::Error) -> &str {
    error.code().map_or("", |state| state.code())
}

/// Returns what tells the rows apart that a role sees for a tenant, or without one.
async fn seen(client: &Client, tenant: Option<&str>, what: &str, table: &str) -> BTreeSet<String> {
    client.batch_execute("BEGIN").await.expect("begun");
    if let Some(tenant) = tenant {
        let name = [(&tenant as &(dyn tokio_postgres::types::ToSql + Sync), tokio_postgres::types::Type::TEXT)];
        client.query_typed("SELECT set_config('postbox.tenant', $1, true)", &name).await.expect("named");
    }
    let sql = format!("SELECT ({what})::text FROM postbox.{table} AS v");
    let rows = client.query_typed(&sql, &[]).await.expect("looked");
    client.batch_execute("COMMIT").await.expect("ended");
    rows.iter().map(|row| row.get(0)).collect()
}

/// Returns the tables in which two tenants see the same row, or in which a session without a tenant
/// sees any.
async fn overlaps(client: &Client, what: &str, tables: &[&'static str]) -> Vec<&'static str> {
    let mut found = Vec::new();
    for &table in tables {
        let [mine, others] = TENANTS.map(|tenant| seen(client, Some(tenant), what, table));
        let (mine, others) = (mine.await, others.await);
        assert!(!mine.is_empty() && !others.is_empty(), "{table}: there is nothing to keep apart");
        // This session set a tenant earlier, so the setting now is the empty string, not unset.
        if !mine.is_disjoint(&others) || !seen(client, None, what, table).await.is_empty() {
            found.push(table);
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_tenants_see_no_row_of_each_other() {
    for version in Version::ALL {
        let world = World::new(version).await;
        world.filled().await;
        // An unrouted event belongs to a tenant too.
        let note = "INSERT INTO postbox.unrouted SELECT 'outbox', seq FROM postbox.outbox";
        world.owner.batch_execute(note).await.expect("noted");
        let client = world.client(&world.operator).await;
        assert_eq!(overlaps(&client, "ctid", &TABLES).await, [] as [&str; 0]);
        // A role that works for all tenants pays nothing for the policies.
        let explain = "EXPLAIN SELECT FROM postbox.outbox WHERE xid >= '3' AND tenant = 'acme' ORDER BY xid, seq";
        let plan = world.client(&world.relay).await.query(explain, &[]).await.expect("explained");
        assert!(!plan.iter().any(|row| row.get::<_, &str>(0).contains("current_setting")), "{plan:?}");
        // Each policy is needed.
        for table in TABLES {
            let alter = async |how: &str| {
                let sql = format!("ALTER TABLE postbox.{table} {how} ROW LEVEL SECURITY");
                world.owner.batch_execute(&sql).await.expect("altered");
            };
            alter("DISABLE").await;
            assert!(overlaps(&client, "ctid", &TABLES).await.contains(&table), "{table}");
            alter("ENABLE").await;
        }
        for sql in [
            "UPDATE postbox.delivery SET error = 'mine'",
            "UPDATE postbox.subscription SET paused_by = 'me'",
            "SELECT FROM postbox.lane FOR UPDATE",
            "DELETE FROM postbox.conflict",
            "DELETE FROM postbox.receipt",
            "DELETE FROM postbox.once",
            "DELETE FROM postbox.unrouted",
        ] {
            assert!(within(&client, TENANTS[0], sql).await.expect(sql) > 0, "{sql}");
        }
        // Other tenants read the log, too.
        let sql = "UPDATE postbox.log SET routed_seq = 1000";
        assert_eq!(within(&client, TENANTS[0], sql).await.expect(sql), 0, "{sql}");
        let left = "SELECT (SELECT count(*) FROM postbox.outbox), (SELECT count(*) FROM postbox.receipt), \
                    (SELECT count(*) FROM postbox.delivery AS d JOIN postbox.subscription AS s ON s.id = d.subscription \
                     WHERE d.error = 'mine' AND (s.name <> 'acme-out'))";
        let row = world.owner.query_one(left, &[]).await.expect("asked");
        assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1), row.get::<_, i64>(2)), (16, 2, 0));
        for sql in [
            "INSERT INTO postbox.receipt (source, tenant, message_id, digest) VALUES ('s', 'other', 'm', '')",
            "INSERT INTO postbox.receipt (source, message_id, digest) VALUES ('s', 'm', '')",
            "INSERT INTO postbox.once (source, tenant, message_id) VALUES ('s', 'other', 'm')",
            "INSERT INTO postbox.inbox (topic, payload, tenant) VALUES ('t', '', 'other')",
            "INSERT INTO postbox.sent (subscription, seq) SELECT 3, 1",
            "INSERT INTO postbox.filter (subscription, revision, topics) SELECT id, 99, '{}' FROM postbox.subscription",
            "INSERT INTO postbox.sleeper (log, owner, asleep_until, tenant) VALUES ('outbox', 'x', 'infinity', 'other')",
            "UPDATE postbox.subscription SET tenant = 'other'",
            "UPDATE postbox.subscription SET name = 'planted'",
            "INSERT INTO postbox.subscription (name, log, topics, tenant, ordering, lanes) VALUES ('planted', 'outbox', '{}', 'acme', 'key', 1)",
            "UPDATE postbox.lane SET to_snap = pg_current_snapshot()",
            "DELETE FROM postbox.outbox",
            "LOCK TABLE postbox.outbox IN ACCESS EXCLUSIVE MODE",
        ] {
            let refused = within(&client, TENANTS[0], sql).await.expect_err(sql);
            assert_eq!(state(&refused), "42501", "{sql}: {refused:?}");
        }
        world.end().await;
    }
}

/// Views read with the rights of whoever asks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_view_shows_two_tenants_no_row_of_each_other() {
    for version in Version::ALL {
        let world = World::new(version).await;
        world.filled().await;
        let relay = world.store(&world.relay, None).await;
        for (tenant, name) in TENANTS.into_iter().zip(["acme-in", "other-in"]) {
            relay.subscribe(&reader_of(tenant, name, LogName::inbox())).await.expect("made");
            world.settle(&relay, name).await;
        }
        let client = world.client(&world.reader).await;
        // The age differs from one look to the next.
        let row = "to_jsonb(v) - 'oldest_pending_seconds'";
        assert_eq!(overlaps(&client, row, &VIEWS).await, [] as [&str; 0]);
        for view in VIEWS {
            let alter = async |how: &str| {
                let sql = format!("ALTER VIEW postbox.{view} SET (security_invoker = {how})");
                world.owner.batch_execute(&sql).await.expect("altered");
            };
            alter("false").await;
            assert!(overlaps(&client, row, &VIEWS).await.contains(&view), "{view}");
            alter("true").await;
        }
        world.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_behind_a_pooler_sends_each_tenant_its_own() {
    for version in Version::ALL {
        let mut world = World::new(version).await;
        let store = world.pooled(&world.relay.clone(), None).await;
        world.filled_by(&store).await;
        for (tenant, name) in TENANTS.into_iter().zip(READERS) {
            let (sent, mut arrived) = tokio::sync::mpsc::unbounded_channel();
            let sink = handler_sink(move |delivery: Delivery| {
                drop(sent.send(delivery.event.tenant));
                std::future::ready(())
            });
            let subscription = reader_of(tenant, name, LogName::outbox());
            let relay = Relay::builder(Arc::new(store.clone()), subscription).sink(Arc::new(sink));
            relay.build().expect("built").drain(None).await.expect("drained");
            let seen: Vec<Option<Tenant>> = std::iter::from_fn(|| arrived.try_recv().ok()).collect();
            // One of the four waits for the earlier event of its key.
            assert_eq!(seen, vec![Tenant::new(tenant).ok(); 3]);
        }
        world.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_appends_for_the_tenant_it_names_and_for_no_other() {
    for version in Version::ALL {
        let mut world = World::new(version).await;
        let client = world.client(&world.writer).await;
        let of = |tenant: &str| NewEvent::json("t", "1").tenant(tenant);
        let (log, many) = (
            LogName::outbox(),
            "SELECT postbox.outbox_append_many(false, ARRAY[gen_random_uuid()], '{t}', \
            '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{acme}', '{1}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}')",
        );
        let mine = [
            "SELECT postbox.enqueue('t', '1', tenant => 'acme')",
            "SELECT postbox.enqueue('t', '\\x00'::bytea, tenant => 'acme')",
            "INSERT INTO postbox.outbox (topic, payload, tenant) VALUES ('t', '1', 'acme')",
            many,
        ];
        for sql in mine {
            within(&client, "acme", sql).await.expect(sql);
            let unset = client.batch_execute(sql).await.expect_err(sql);
            assert_eq!(state(&unset), "42501", "{sql}: {unset:?}");
            for named in ["other", ""] {
                let refused = within(&client, named, sql).await.expect_err(sql);
                assert_eq!(state(&refused), "42501", "{sql} for {named:?}: {refused:?}");
            }
        }
        for nobodys in
            ["SELECT postbox.enqueue('t', '1')", "INSERT INTO postbox.outbox (topic, payload) VALUES ('t', '1')"]
        {
            assert!(within(&client, "acme", nobodys).await.is_err(), "{nobodys}");
        }
        let pooled = world.pooled(&world.writer.clone(), Some("acme")).await;
        for writer in [world.store(&world.writer, Some("acme")).await, pooled] {
            writer.append(&log, &[of("acme")]).await.expect("appended");
            let refused = writer.append(&log, &[of("acme"), of("other")]).await.expect_err("another's");
            assert_eq!(refused.code(), "tenant_denied");
            let nobody = world.store(&world.writer, None).await;
            let refused = nobody.append(&log, &[of("acme")]).await.expect_err("it names no tenant");
            assert_eq!(refused.code(), "tenant_denied");
        }
        let relay = world.store(&world.relay, None).await;
        relay.append(&log, &[of("acme"), NewEvent::json("t", "1")]).await.expect("for all");
        let count: i64 = world.owner.query_one("SELECT count(*) FROM postbox.outbox", &[]).await.expect("asked").get(0);
        assert_eq!(count, 8);
        world.end().await;
    }
}

/// An event that its own tenant appends again is known. If another tenant uses the same id, that is
/// a conflict, and the error reveals nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_is_known_to_its_tenant_and_to_no_other() {
    for version in Version::ALL {
        let mut world = World::new(version).await;
        let log = LogName::outbox();
        let paid = |tenant: &str| {
            NewEvent::json("t", "1").tenant(tenant).id(EventId::from_key("order-42-paid").expect("a key"))
        };
        let [mine, other] = TENANTS;
        let pooled = world.pooled(&world.writer.clone(), Some(mine)).await;
        for (n, writer) in [world.store(&world.writer, Some(mine)).await, pooled].iter().enumerate() {
            for (m, events) in
                [vec![paid(mine)], vec![NewEvent::json("t", "2").tenant(mine), paid(mine)]].iter().enumerate()
            {
                assert_eq!(writer.append(&log, events).await.expect("appended").known(), usize::from(n + m > 0));
            }
        }
        let theirs = world.store(&world.writer, Some(other)).await;
        for events in [vec![paid(other)], vec![paid(other), NewEvent::json("t", "2").tenant(other)]] {
            assert_eq!(theirs.append(&log, &events).await.expect_err("it is not theirs").code(), "event_id_taken");
        }
        assert_eq!(theirs.append(&log, &[paid(mine)]).await.expect_err("it is not theirs").code(), "tenant_denied");
        let relay = world.store(&world.relay, None).await;
        let nobodys = NewEvent::json("t", "1").id(EventId::from_key("of nobody").expect("a key"));
        for known in [1, 2] {
            assert_eq!(relay.append(&log, &[paid(mine), nobodys.clone()]).await.expect("for all").known(), known);
        }
        // The call leaves the caller's own tenant as it was.
        let client = world.client(&world.relay).await;
        let again = "SELECT postbox.enqueue('t', '1', tenant => 'acme', id => postbox.event_id('order-42-paid'))";
        let asked =
            format!("{again}; SELECT pg_catalog.set_config('test.named', current_setting('postbox.tenant'), false)");
        client
            .batch_execute(&format!("BEGIN; SELECT set_config('postbox.tenant', 'third', true); {asked}; COMMIT"))
            .await
            .expect("asked");
        let named: String = client.query_one("SELECT current_setting('test.named')", &[]).await.expect("asked").get(0);
        assert_eq!(named, "third");
        world.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_command_sees_one_tenant() {
    for version in Version::ALL {
        let mut world = World::new(version).await;
        world.filled().await;
        let ids = "SELECT id FROM postbox.outbox WHERE tenant <> 'acme'";
        let others: Vec<EventId> = world
            .owner
            .query(ids, &[])
            .await
            .expect("asked")
            .iter()
            .map(|row| EventId::from_uuid(row.get(0)))
            .collect();
        let pooled = world.pooled(&world.reader.clone(), Some("acme")).await;
        let readers = [world.store(&world.reader, Some("acme")).await, pooled];
        for reader in &readers {
            looks(reader, &others).await;
        }
        for reader in &readers {
            watches(reader, &world).await;
        }
        let before = untouched(&world.owner).await;
        calls(&world, &others).await;
        let pooled = world.pooled(&world.operator.clone(), Some("acme")).await;
        changes(&pooled, &world, &others).await;
        assert_eq!(untouched(&world.owner).await, before);
        receives(&pooled, &world).await;
        world.end().await;
    }
}

/// Returns everything that does not belong to acme, as text.
async fn untouched(owner: &Client) -> Vec<String> {
    let sql = "SELECT d::text FROM postbox.delivery AS d JOIN postbox.subscription AS s ON s.id = d.subscription \
               WHERE s.name <> 'acme-out' UNION ALL SELECT s::text FROM postbox.subscription AS s WHERE s.name <> 'acme-out' ORDER BY 1";
    owner.query(sql, &[]).await.expect("asked").iter().map(|row| row.get(0)).collect()
}

async fn looks(reader: &PostgresStore, others: &[EventId]) {
    let (mine, outbox) = (named("acme-out"), LogName::outbox());
    let known = reader.subscriptions().await.expect("listed");
    assert_eq!(known.iter().map(|info| info.name.as_str()).collect::<Vec<_>>(), ["acme-out"]);
    let stats = reader.stats(&mine).await.expect("counted");
    assert_eq!((stats.total, stats.pending, stats.dead, stats.retrying, stats.dispatched), (8, 5, 1, 1, 2));
    for state in State::ALL {
        let mut query = ListQuery {
            subscription: mine.clone(),
            state: Some(state),
            which: Criteria::default(),
            code: None,
            headers: Headers::new(),
            after: None,
            limit: 100,
            payloads: true,
        };
        let records = reader.list(&query).await.expect("listed");
        assert!(
            records.iter().all(|record| record.event.tenant.as_ref().is_some_and(|tenant| tenant.as_str() == "acme"))
        );
        assert!(records.iter().all(|record| record.event.payload.len() == 50_000), "large ones are whole");
        query.subscription = named("shared");
        assert_eq!(reader.list(&query).await.expect_err("unknown").code(), "subscription_unknown");
    }
    for id in others {
        assert!(reader.get(&mine, *id).await.expect("asked").is_none());
        assert!(reader.ids(&outbox, &IdPrefix::from(*id), 2).await.expect("asked").is_empty());
    }
    // Ids begin with the time, so this is the beginning of ids of both.
    let begins: IdPrefix = others[0].to_string()[..8].parse().expect("a prefix");
    let ids = reader.ids(&outbox, &begins, 100).await.expect("asked");
    assert!(!ids.is_empty() && ids.iter().all(|id| !others.contains(id)), "{ids:?}");
    for unknown in ["other-out", "shared", "moved"] {
        let error = reader.stats(&named(unknown)).await.expect_err("it is not acme's");
        assert_eq!(error.code(), "subscription_unknown");
        assert!(
            ["other-out", "shared", "moved"]
                .iter()
                .filter(|name| **name != unknown)
                .all(|name| !error.message().contains(name))
        );
    }
    assert_eq!(reader.count(&outbox).await.expect("counted").events, 8);
    let arrivals = reader.arrivals(&outbox, 100).await.expect("looked");
    assert!(arrivals.len() == 8 && arrivals.iter().all(|arrival| arrival.tenant.as_deref() == Some("acme")));
    assert_eq!(reader.conflicts(100).await.expect("listed").len(), 1);
}

/// A look at what both append from now on. Their subscriptions do not want it.
async fn watches(reader: &PostgresStore, world: &World) {
    let (outbox, limit) = (LogName::outbox(), BatchLimit { events: 10, payload_bytes: 1_000 });
    let begun = reader.tail(&outbox, &Criteria::default(), None, limit).await.expect("begun");
    for tenant in TENANTS {
        let writer = world.store(&world.writer, Some(tenant)).await;
        writer.append(&outbox, &[NewEvent::json("b", "1").tenant(tenant)]).await.expect("appended");
    }
    for (tenant, expected) in [(None, 1), (Some(TENANTS[0]), 1), (Some(TENANTS[1]), 0)] {
        let which = Criteria { tenant: tenant.and_then(|tenant| tenant.parse().ok()), ..Criteria::default() };
        let seen = reader.tail(&outbox, &which, Some(&begun.place), limit).await.expect("looked");
        let mine = |tenant: &Tenant| tenant.as_str() == TENANTS[0];
        assert_eq!(seen.events.len(), expected, "{tenant:?}");
        assert!(seen.events.iter().all(|(_, event)| event.tenant.as_ref().is_some_and(mine)), "{tenant:?}");
    }
}

/// Functions in SQL, with names and ids that are another's.
async fn calls(world: &World, others: &[EventId]) {
    let client = world.client(&world.operator).await;
    let ids = others.iter().map(EventId::to_string).collect::<Vec<_>>().join(",");
    let changes = |name: &str| {
        [
            format!("postbox.retry('{name}', VARIADIC '{{{ids}}}')"),
            format!("postbox.discard('{name}', VARIADIC '{{{ids}}}')"),
            format!("postbox.mark_dead('{name}', 'so', VARIADIC '{{{ids}}}')"),
        ]
    };
    for change in changes("acme-out") {
        let changed = within(&client, "acme", &format!("SELECT WHERE {change} > 0")).await.expect(&change);
        assert_eq!(changed, 0, "{change}");
    }
    for unknown in ["other-out", "shared", "moved"] {
        let pauses = [format!("postbox.pause('{unknown}', 'so')"), format!("postbox.resume('{unknown}')")];
        for call in changes(unknown).into_iter().chain(pauses) {
            let refused = within(&client, "acme", &format!("SELECT {call}")).await.expect_err(&call);
            let hint = refused.as_db_error().and_then(|error| error.hint());
            assert_eq!((state(&refused), hint), ("PB002", Some("known: acme-out")), "{call}");
        }
        let depth = format!("SELECT FROM postbox.depth('{unknown}')");
        assert_eq!(within(&client, "acme", &depth).await.expect(&depth), 0, "{depth}");
    }
    let has = format!(
        "SELECT FROM unnest('{{{ids}}}'::uuid[]) AS id, unnest('{{1,2,3,4}}'::text[]) AS key \
         WHERE postbox.outbox_has(id, 'a', key, current_setting('postbox.tenant'), repeat(key, 50000), NULL)"
    );
    for (tenant, known) in [(TENANTS[0], 0), (TENANTS[1], 8)] {
        assert_eq!(within(&client, tenant, &has).await.expect("asked"), known, "{tenant}");
    }
}

async fn changes(operator: &PostgresStore, world: &World, others: &[EventId]) {
    let (mine, all) = (named("acme-out"), Selection::default());
    let theirs = Selection { ids: Some(others.to_vec()), ..Selection::default() };
    let replay = Replay { ids: Some(others.to_vec()), ..Replay::default() };
    assert_eq!(operator.change(&mine, &Change::Retry, &theirs).await.expect("asked").count, 0);
    let mark = Change::MarkDead { why: None };
    for end in [&Change::Discard, &mark] {
        assert_eq!(operator.change(&mine, end, &theirs).await.expect("asked").count, 0);
    }
    assert_eq!(operator.replay(&mine, &replay).await.expect("asked").count, 0);
    for unknown in ["other-out", "shared", "moved"].map(named) {
        let refused = [
            operator.change(&unknown, &Change::Retry, &all).await.expect_err("unknown"),
            operator.change(&unknown, &Change::Discard, &all).await.expect_err("unknown"),
            operator.change(&unknown, &mark, &all).await.expect_err("unknown"),
            operator.replay(&unknown, &Replay::default()).await.expect_err("unknown"),
            operator.pause(&unknown, None).await.expect_err("unknown"),
        ];
        assert!(refused.iter().all(|error| error.code() == "subscription_unknown"), "{refused:?}");
    }
    assert_eq!(operator.change(&mine, &Change::Retry, &all).await.expect("retried").count, 2);
    assert_eq!(operator.replay(&mine, &Replay::default()).await.expect("replayed").count, 2);
    assert_eq!(operator.change(&mine, &mark, &all).await.expect("marked").count, 4);
    assert_eq!(operator.change(&mine, &Change::Discard, &all).await.expect("discarded").count, 4);
    let pause = postbox_core::Pause { until: None, by: "me".into(), why: "so".into() };
    operator.pause(&mine, Some(&pause)).await.expect("paused");
    let subscription = Subscription { lanes: Some(1), ..Subscription::new(mine.clone(), LogName::outbox()) };
    for refused in [
        operator.subscribe(&subscription).await.map(drop),
        operator.prune(&LogName::outbox(), &Prune::default()).await.map(drop),
        operator.note_unrouted(&LogName::outbox()).await.map(drop),
        operator.rename(&mine, 0, &named("acme-in")).await,
        operator.remove(&mine, 0).await,
        operator.set_lanes(&mine, 2).await,
    ] {
        assert_eq!(refused.expect_err("it is done for all tenants").code(), "tenant_limited");
    }
    let unnamed = world.store(&world.operator, None).await;
    for refused in [
        unnamed.subscribe(&subscription).await.map(drop),
        unnamed.prune(&LogName::outbox(), &Prune::default()).await.map(drop),
    ] {
        let refused = refused.expect_err("it works for no tenant");
        assert_eq!(refused.code(), "tenant_not_named");
        // To name one would be refused as well.
        assert!(!refused.message().contains("[store]"), "{refused}");
    }
}

/// The same message id from another tenant is another message.
async fn receives(operator: &PostgresStore, world: &World) {
    let inbox = LogName::inbox();
    assert!(matches!(operator.receive(&inbox, inbound("acme", "3", "x")).await, Ok(Received::Accepted(_))));
    assert_eq!(operator.receive(&inbox, inbound("acme", "3", "x")).await.expect("known"), Received::Duplicate);
    assert_eq!(operator.receive(&inbox, inbound("acme", "3", "xy")).await.expect("known"), Received::Conflict);
    let refused = operator.receive(&inbox, inbound("other", "3", "x")).await.expect_err("another's");
    assert_eq!(refused.code(), "tenant_denied");
    let other = world.store(&world.operator, Some(TENANTS[1])).await;
    let several = ["3", "4"].map(|id| inbound(TENANTS[1], id, "x"));
    let received = other.receive_many(&inbox, &several).await.expect("received");
    assert!(received.iter().all(|received| matches!(received, Received::Accepted(_))), "{received:?}");
    let once = "INSERT INTO postbox.once (source, message_id) VALUES ('s', 'n') ON CONFLICT DO NOTHING";
    let client = world.client(&world.operator).await;
    for (tenant, first) in [("acme", 1), (TENANTS[1], 1), ("acme", 0), (TENANTS[1], 0)] {
        assert_eq!(within(&client, tenant, once).await.expect("asked"), first, "{tenant}");
    }
}
