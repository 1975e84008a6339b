//! Transactions of every driver on a real Postgres, with one set of cases for all of them.

mod diesel;
mod diesel_async;
mod diesel_async_pool;
mod sea_orm;
mod sqlx;
mod sqlx08;
mod tokio_postgres;

use std::collections::BTreeMap;

use async_trait::async_trait;
use postbox::contract::{Inspect as _, Log as _, Store as _};
use postbox::postgres::{Postgres, PostgresConfig, PostgresStore};
use postbox::{
    Appended, Error, EventId, LogName, Migrate as _, NewEvent, Postbox, Result, Subscription, SubscriptionName,
    TypedEvent,
};
use postbox_testkit::servers::{Postgres as Server, Version};
use serde::Serialize;

/// A driver under test.
#[async_trait]
trait Driver {
    /// In one transaction on a separate connection, appends each list, then commits or rolls back.
    /// Returns the result of each append.
    async fn append(url: &str, postbox: &Postbox<Postgres>, lists: Vec<Vec<Typed>>, end: End) -> Vec<Result<Appended>>;

    /// Appends without a transaction. `None` if that does not compile.
    async fn append_outside(url: &str, postbox: &Postbox<Postgres>) -> Option<Error>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Commit,
    RollBack,
}

/// A typed event with this content. Without content its payload cannot be encoded, because JSON has
/// no keys that are lists.
#[derive(Debug, Serialize)]
struct Typed {
    #[serde(skip)]
    event: Option<NewEvent>,
    unwritable: BTreeMap<Vec<u8>, u8>,
}

impl TypedEvent for Typed {
    const TOPIC: &'static str = "typed";

    fn describe(&self, event: NewEvent) -> NewEvent {
        self.event.clone().unwrap_or(event)
    }
}

fn typed(events: impl IntoIterator<Item = NewEvent>) -> Vec<Typed> {
    events.into_iter().map(|event| Typed { event: Some(event), unwritable: BTreeMap::new() }).collect()
}

/// A fresh store in a separate database.
struct Fixture {
    store: PostgresStore,
    url: String,
    reader: SubscriptionName,
    _server: Server,
}

async fn fixture() -> Fixture {
    let server = Server::shared(Version::V15).await;
    let url = server.fresh_database().await;
    let store = PostgresStore::connect(PostgresConfig::new(&url)).await.expect("a store");
    store.up().await.expect("migrated");
    let reader = SubscriptionName::new("reader").expect("a name");
    store.subscribe(&Subscription::new(reader.clone(), LogName::outbox())).await.expect("subscribed");
    Fixture { store, url, reader, _server: server }
}

impl Fixture {
    async fn append<D: Driver>(&self, lists: Vec<Vec<Typed>>, end: End) -> Vec<Result<Appended>> {
        D::append(&self.url, &self.store.postbox(), lists, end).await
    }

    /// Asserts that the log has this event under this id.
    async fn has(&self, id: EventId, event: &NewEvent) {
        let stored = self.store.get(&self.reader, id).await.expect("read").expect("the event is there").event;
        // An event without a time happened when it was appended.
        let mut event = event.clone();
        event.occurred_at.get_or_insert(stored.occurred_at);
        assert_eq!(stored, event.into_event(id, stored.created_at));
    }

    async fn events(&self) -> u64 {
        self.store.stats(&self.reader).await.expect("counted").pending
    }
}

/// Events with every field set, and texts that an array must quote.
fn strange() -> Vec<NewEvent> {
    let at = "2026-01-02T03:04:05.000006Z".parse().expect("a time");
    let full = NewEvent::new("order.paid", vec![0, 0xff, b'\\'], "application/octet-stream")
        .key(r#"a"b\c,{d} 'e'"#)
        .aggregate("order")
        .version(i64::MIN)
        .kind("NULL")
        .source("ünï")
        .tenant("t")
        .header("h", r#"\"{},"#)
        .occurred_at(at)
        .deliver_at(at)
        .expires_at(at + std::time::Duration::from_micros(1));
    let texts = ["", "NULL", "{}", r#"{"a":"\n\\\""}"#, r"\x41", "\u{1F600}\n"];
    let payloads = texts.map(|text| NewEvent::json("t", text.to_owned()));
    std::iter::once(full).chain(payloads).collect()
}

async fn one_event_and_several_come_back_as_they_were<D: Driver>() {
    let fixture = fixture().await;
    // Under this setting, NULL in an array is a text.
    let setting = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET array_nulls = off', current_database()); END $$";
    tokio_postgres::client(&fixture.url).await.batch_execute(setting).await.expect("set");
    let events = strange();
    let alone = events.iter().map(|event| typed([event.clone()]));
    let lists = alone.chain([typed(events.clone()), Vec::new()]).collect();
    let ids: Vec<Vec<EventId>> =
        fixture.append::<D>(lists, End::Commit).await.into_iter().map(|it| it.expect("appended").to_vec()).collect();
    assert_eq!(ids[events.len() + 1], []);
    for (id, event) in ids.concat().iter().zip(events.iter().chain(&events)) {
        fixture.has(*id, event).await;
    }
    assert_eq!(ids.concat().len(), 2 * events.len());
}

async fn what_is_rolled_back_is_gone<D: Driver>() {
    let fixture = fixture().await;
    let lists = || vec![typed([NewEvent::json("t", "1")]), typed([NewEvent::json("t", "2"), NewEvent::json("t", "3")])];
    for ids in fixture.append::<D>(lists(), End::RollBack).await {
        for id in ids.expect("appended").iter() {
            assert!(fixture.store.get(&fixture.reader, *id).await.expect("read").is_none());
        }
    }
    assert_eq!(fixture.events().await, 0);
    fixture.append::<D>(lists(), End::Commit).await;
    assert_eq!(fixture.events().await, 3);
}

async fn what_is_refused_before_it_is_sent_leaves_the_transaction_whole<D: Driver>() {
    let fixture = fixture().await;
    let unwritable = vec![Typed { event: None, unwritable: BTreeMap::from([(vec![1], 1)]) }];
    let lists = vec![unwritable, typed([NewEvent::json("no topic", "{}")]), typed([NewEvent::json("t", "{}")])];
    let given = fixture.append::<D>(lists, End::Commit).await;
    let codes: Vec<_> = given.iter().map(|it| it.as_ref().map_err(Error::code).map(|it| it.len())).collect();
    assert_eq!(codes, [Err("payload_not_encoded"), Err("topic_invalid"), Ok(1)]);
    assert_eq!(fixture.events().await, 1);
}

async fn what_is_known_is_not_appended_again_and_the_transaction_goes_on<D: Driver>() {
    let fixture = fixture().await;
    let own = |(n, event): (u32, NewEvent)| event.id(EventId::from_key(format!("event {n}")).expect("a key"));
    let events: Vec<NewEvent> = (0..).zip(strange()).map(own).collect();
    let append = async |lists: Vec<Vec<NewEvent>>| -> Vec<usize> {
        let given = fixture.append::<D>(lists.into_iter().map(typed).collect(), End::Commit).await;
        given.into_iter().map(|it| it.expect("appended").known()).collect()
    };
    let alone = || events.iter().map(|event| vec![event.clone()]).chain([vec![NewEvent::json("t", "{}")]]).collect();
    assert_eq!(append(alone()).await, [0; 8]);
    assert_eq!(append(alone()).await, [1, 1, 1, 1, 1, 1, 1, 0]);
    let mixed = [&strange()[..], &events[..3]].concat();
    assert_eq!(append(vec![events.clone(), mixed]).await, [7, 3]);
    assert_eq!(fixture.events().await, 7 + 2 + 7);
}

async fn what_the_server_refuses_has_the_code_it_has_elsewhere<D: Driver>() {
    let fixture = fixture().await;
    let postbox = fixture.store.postbox();
    let refused = async |postbox: &Postbox<Postgres>, events: Vec<NewEvent>| {
        let mut given = D::append(&fixture.url, postbox, vec![typed(events)], End::RollBack).await;
        given.remove(0).expect_err("refused")
    };
    let id = EventId::now_v7();
    let event = NewEvent::json("t", "{}").id(id);
    fixture.append::<D>(vec![typed([event.clone()])], End::Commit).await.remove(0).expect("appended");
    let other = NewEvent::json("t", "[]").id(id);
    assert_eq!(refused(&postbox, vec![other.clone()]).await.code(), "event_id_taken");
    assert_eq!(refused(&postbox, vec![other, NewEvent::json("t", "{}")]).await.code(), "event_id_taken");

    let nowhere = postbox.log(LogName::new("nowhere").expect("a name"));
    let error = refused(&nowhere, vec![NewEvent::json("t", "{}")]).await;
    assert_eq!(error.code(), "log_unknown", "{error:?}");
    let error = refused(&nowhere, vec![NewEvent::json("t", "{}"), NewEvent::json("t", "{}")]).await;
    assert_eq!(error.code(), "log_unknown", "{error:?}");

    let client = tokio_postgres::client(&fixture.url).await;
    let rule = "ALTER TABLE postbox.outbox ADD CONSTRAINT no_mondays CHECK (topic <> 'monday')";
    client.batch_execute(rule).await.expect("altered");
    let error = refused(&fixture.store.postbox(), vec![NewEvent::json("monday", "{}")]).await;
    assert_eq!(error.code(), "no_mondays", "{error:?}");
}

async fn a_connection_without_a_transaction_is_refused<D: Driver>() {
    let fixture = fixture().await;
    if let Some(error) = D::append_outside(&fixture.url, &fixture.store.postbox()).await {
        assert_eq!(error.code(), "no_transaction", "{error:?}");
    }
    assert_eq!(fixture.events().await, 0);
}

macro_rules! suite {
    ($($driver:ident)*) => {
        $(mod $driver {
            suite!(super::super::$driver::Driver:
                one_event_and_several_come_back_as_they_were
                what_is_rolled_back_is_gone
                what_is_refused_before_it_is_sent_leaves_the_transaction_whole
                what_is_known_is_not_appended_again_and_the_transaction_goes_on
                what_the_server_refuses_has_the_code_it_has_elsewhere
                a_connection_without_a_transaction_is_refused
            );
        })*
    };
    ($driver:path: $($case:ident)*) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            super::super::$case::<$driver>().await;
        })*
    };
}

mod suite {
    suite! { diesel diesel_async diesel_async_pool sea_orm sqlx sqlx08 tokio_postgres }
}
