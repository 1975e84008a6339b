//! Makes every call that a writer, a relay and an operator make.

use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Admin as _, Append as _, Batch, BatchLimit, Change, Criteria, Delivery, Diagnose as _, Disposition, Entry, EventId,
    Headers, Inbound, Inspect as _, Lease, ListQuery, Log as _, LogName, Maintain as _, Migrate as _, NewEvent,
    Outcome, OwnerId, Pause, Prune, Receive as _, Received, Selection, Settlement, SourceName, State, Store as _,
    Subscription, SubscriptionName,
};
use postbox_postgres::{PostgresStore, TxHandler};
use tokio_postgres::{Client, Transaction};

const LONG: Duration = Duration::from_secs(600);

/// A handler that does nothing.
struct Nothing;

#[async_trait]
impl TxHandler for Nothing {
    async fn handle(&self, _: &Transaction<'_>, _: &Delivery) -> Outcome {
        Outcome::DELIVERED
    }
}

async fn lease(relay: &PostgresStore, name: &str, log: LogName) -> Lease {
    let name = SubscriptionName::new(name).expect("a name");
    relay
        .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(name.clone(), log) })
        .await
        .expect("subscribed");
    let owner = OwnerId::new("test").expect("a name");
    relay.acquire(&name, &owner, &[], LONG).await.expect("acquired").lease.expect("a free lane")
}

async fn settle(relay: &PostgresStore, lease: &Lease, batch: &Batch, exceptions: Vec<(usize, Disposition)>) {
    let entry = |(at, disposition)| Entry { delivery: &batch.deliveries[at], disposition };
    let entries = exceptions.into_iter().map(entry).collect();
    let settlement = Settlement { position: batch.end, entries, rewind: false, hold_keys: true };
    relay.settle(lease, settlement).await.expect("settled");
}

fn retry() -> Disposition {
    Disposition::Retry { after: Duration::ZERO, counted: true, code: "http_500".into(), error: "no".into(), took: None }
}

fn dead() -> Disposition {
    Disposition::Dead { code: "http_422".into(), error: "never".into(), halt: false, took: None }
}

/// `writer` and `client` append, each in its own way; `relay` does the rest. Panics at the first
/// call that fails.
pub(crate) async fn everything(writer: &PostgresStore, client: &Client, relay: &PostgresStore) {
    let schema = relay.schema().quoted().to_owned();
    append(writer, client, &schema).await;
    let lane = lease(relay, "reader", LogName::outbox()).await;
    let batch = relay.next_batch(&lane, BatchLimit::default()).await.expect("read");
    assert_eq!(batch.deliveries.len(), 8);
    assert!(batch.unreadable.is_empty(), "{:?}", batch.unreadable);
    let at = jiff::Timestamp::now() + Duration::from_secs(3_600);
    let exceptions = vec![(0, retry()), (1, Disposition::Block), (2, dead()), (3, Disposition::Schedule { at })];
    settle(relay, &lane, &batch, exceptions).await;
    relay.renew(&lane, LONG).await.expect("renewed");
    assert!(relay.next_batch(&lane, BatchLimit::default()).await.expect("read").is_empty());
    operate(relay, &batch).await;
    let due = relay.due(&lane, BatchLimit::default()).await.expect("due");
    assert_eq!(due.deliveries.len(), 3, "the head, what is behind it, and what was retried");
    let delivered = (0..due.deliveries.len()).map(|at| (at, Disposition::Delivered)).collect();
    settle(relay, &lane, &due, delivered).await;

    receive(relay).await;
    let inbox = lease(relay, "inbox-reader", LogName::inbox()).await;
    let batch = relay.next_batch(&inbox, BatchLimit::default()).await.expect("read");
    let refs: Vec<&Delivery> = batch.deliveries.iter().collect();
    assert_eq!(refs.len(), 3);
    let settlement = Settlement { position: batch.end, entries: Vec::new(), rewind: false, hold_keys: true };
    relay.apply(Nothing).apply(&inbox, &refs, settlement, &|_, _| Disposition::Delivered).await.expect("applied");
    for lane in [&lane, &inbox] {
        relay.release(lane).await.expect("released");
    }
    let prune = async |log: LogName| relay.prune(&log, &Prune::default()).await.expect("pruned").count;
    assert!(prune(LogName::outbox()).await > 0);
    assert_eq!(prune(LogName::inbox()).await, 3);
}

/// Plain SQL that a relay's role may also run, after [`everything`].
pub(crate) async fn by_hand(client: &Client, schema: &str) {
    let calls = format!(
        "SELECT * FROM {schema}.stats; SELECT * FROM {schema}.outbox_state; SELECT * FROM {schema}.inbox_dead;
         SELECT {schema}.receive('hooks', 'by-hand', 't', '{{}}'); SELECT {schema}.receive('hooks', 'by-hand', 't', '[]');
         SELECT {schema}.receive('hooks', 'bytes', 't', pg_catalog.decode('00ff', 'hex'), tenant => 'acme');
         SELECT {schema}.once('hooks', 'by-hand');
         SELECT {schema}.retry('inbox-reader', (SELECT id FROM {schema}.inbox LIMIT 1));
         SELECT {schema}.mark_dead('inbox-reader', 'so', (SELECT id FROM {schema}.inbox LIMIT 1));
         SELECT {schema}.discard('inbox-reader', (SELECT id FROM {schema}.inbox LIMIT 1));
         SELECT {schema}.pause('inbox-reader', 'so', until => '2100-01-01');
         SELECT {schema}.resume('inbox-reader');"
    );
    client.batch_execute(&calls).await.expect("called");
    let stats =
        format!("SELECT discarded FROM {schema}.stats WHERE subscription OPERATOR(pg_catalog.=) 'inbox-reader'");
    assert_eq!(client.query_one(&stats, &[]).await.expect("counted").get::<_, i64>(0), 1);
}

/// Appends eight events, the first two with key `k`, and checks the rules that the database
/// enforces.
async fn append(writer: &PostgresStore, client: &Client, schema: &str) {
    let events = [NewEvent::json("t.a", "1").key("k").header("a", "b"), NewEvent::json("t.a", "2").key("k")];
    let events = events.map(|event| event.id(EventId::now_v7()));
    for known in [0, 2] {
        assert_eq!(writer.append(&LogName::outbox(), &events).await.expect("appended").known(), known);
        let alone = writer.append(&LogName::outbox(), &events[..1]).await.expect("it is known");
        assert!(!alone.is_new());
    }
    let in_sql = format!(
        "SELECT {schema}.enqueue('t.b', '{{\"n\":3}}', key => 'x', headers => '{{\"a\":\"b\"}}');
         SELECT {schema}.enqueue('t.b', E'\\\\x41', log => 'outbox', content_type => 'text/plain');
         SELECT {schema}.enqueue('t.b', '{{\"n\":4}}'::pg_catalog.jsonb, id => {schema}.event_id('four'));
         SELECT {schema}.enqueue('t.b', '{{\"n\":4}}'::pg_catalog.jsonb, id => {schema}.event_id('four'));
         SELECT {schema}.enqueue('t.b', pg_catalog.decode('00ff', 'hex'), id => {schema}.event_id('five'));
         SELECT {schema}.enqueue('t.b', pg_catalog.decode('00ff', 'hex'), id => {schema}.event_id('five'));
         INSERT INTO {schema}.outbox (topic, payload, headers, tenant, kind) VALUES ('t.c', '5', '{{\"a\":\"b\"}}', 'acme', 'k');
         INSERT INTO {schema}.outbox (topic, payload, headers) VALUES ('t.c', '6', E'{{\"a\":\"\u{e9} \\\\u0022\"}}');"
    );
    client.batch_execute(&in_sql).await.expect("enqueued");
    for (columns, values, code) in [
        ("headers", "E'{\"a\":\"x\\\\u0001\"}'", "header_value_invalid"),
        ("headers", "'{\"a b\":\"x\"}'", "header_name_invalid"),
        ("headers", "'[]'", "headers_invalid"),
        ("tenant", "pg_catalog.chr(10)", "tenant_invalid"),
        ("key", "''", "key_empty"),
        ("created_at", "'infinity'", "created_at_invalid"),
    ] {
        let sql = format!("INSERT INTO {schema}.outbox (topic, payload, {columns}) VALUES ('t', '', {values})");
        let refused = client.batch_execute(&sql).await.expect_err(&sql);
        let said = refused.as_db_error().expect("the database said so");
        // A role with column rights cannot even name the store's own columns.
        assert!(said.constraint() == Some(code) || said.code().code() == "42501", "{sql}: {said:?}");
    }
}

async fn operate(relay: &PostgresStore, batch: &Batch) {
    let name = SubscriptionName::new("reader").expect("a name");
    assert_eq!(relay.subscriptions().await.expect("listed").len(), 1);
    let stats = relay.stats(&name).await.expect("counted");
    assert_eq!((stats.total, stats.pending, stats.dead, stats.dispatched), (8, 3, 1, 4));
    for state in State::ALL {
        let query = ListQuery {
            subscription: name.clone(),
            state: Some(state),
            which: Criteria::default(),
            code: None,
            headers: Headers::new(),
            after: None,
            limit: 10,
            payloads: true,
        };
        relay.list(&query).await.expect("listed");
    }
    let record = relay.get(&name, batch.deliveries[2].event.id).await.expect("asked").expect("there");
    assert_eq!((record.state, record.code.as_deref()), (State::Dead, Some("http_422")));
    let all = Selection::default();
    assert_eq!(relay.change(&name, &Change::Retry, &all).await.expect("requeued").count, 1);
    let scheduled = Selection { ids: Some(vec![batch.deliveries[3].event.id]), ..Selection::default() };
    assert_eq!(relay.change(&name, &Change::Discard, &scheduled).await.expect("discarded").count, 1);
    let pause = Pause { until: None, by: "me".into(), why: "so".into() };
    relay.pause(&name, Some(&pause)).await.expect("paused");
    relay.pause(&name, None).await.expect("resumed");
    assert_eq!(relay.logs().await.expect("listed").len(), 2);
    assert_eq!(relay.count(&LogName::outbox()).await.expect("counted").events, 8);
    assert_eq!(relay.arrivals(&LogName::outbox(), 10).await.expect("looked").len(), 8);
    relay.blockers().await.expect("looked");
    relay.check_integrity().await.expect("they fit");
    relay.validate().await.expect("valid");
}

async fn receive(relay: &PostgresStore) {
    let inbound = |id: &str, body: &str| Inbound {
        source: SourceName::new("hooks").expect("a name"),
        message_id: id.to_owned(),
        digest: [body.len() as u8; 32],
        event: NewEvent::json("in", body.to_owned()).key("k").header("a", "b"),
    };
    let inbox = LogName::inbox();
    assert!(matches!(relay.receive(&inbox, inbound("1", "a")).await.expect("received"), Received::Accepted(_)));
    assert_eq!(relay.receive(&inbox, inbound("1", "a")).await.expect("received"), Received::Duplicate);
    assert_eq!(relay.receive(&inbox, inbound("1", "ab")).await.expect("received"), Received::Conflict);
    let several = [inbound("2", "a"), inbound("1", "a"), inbound("3", "a")];
    assert_eq!(relay.receive_many(&inbox, &several).await.expect("received")[1], Received::Duplicate);
    assert_eq!(relay.conflicts(10).await.expect("listed").len(), 1);
    assert_eq!(relay.forget(LONG).await.expect("forgotten"), 0);
}
