//! What the owner of the tables does for all tenants, although the policies apply to it too.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use postbox_core::{
    Append as _, Delivery, EventId, Inspect as _, Log as _, LogName, Maintain as _, Migrate as _, NewEvent, OwnerId,
    Store as _, Subscription,
};
use postbox_engine::Relay;
use postbox_postgres::{PostgresConfig, PostgresStore, Roles};
use postbox_router::handler_sink;
use postbox_testkit::servers::{Postgres, Version};
use tokio_util::sync::CancellationToken;

use super::world::{World, named, reader_of, within};
use crate::support::{self, WORKER, url_as};

/// If the owner saw only one tenant's rows, a rebase would leave out those of the others, and a
/// removal would not notice that they are undelivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_is_bound_rebases_and_removes_everything() {
    for version in Version::ALL {
        let server = Postgres::shared(version).await;
        let url = server.fresh_database().await;
        let admin = support::client(&url).await;
        let [owner, relay] =
            ["owner", "relay"].map(|name| format!("bound_{name}_{}_{}", version.number(), std::process::id()));
        let database = url.rsplit('/').next().and_then(|rest| rest.split('?').next()).expect("a name");
        let roles = format!(
            "CREATE ROLE {owner} LOGIN; CREATE ROLE {relay} LOGIN; GRANT CREATE ON DATABASE \"{database}\" TO {owner}"
        );
        admin.batch_execute(&roles).await.expect("roles");
        let store = support::migrated(PostgresConfig::new(url_as(&url, &owner))).await;
        let client = support::client(&url_as(&url, &owner)).await;
        let roles = Roles { relays: vec![relay.clone()], all_tenants: vec![relay.clone()], ..Roles::default() };
        client.batch_execute(&store.grants(&roles).await.expect("printed")).await.expect("granted");

        let working = PostgresStore::connect(PostgresConfig::new(url_as(&url, &relay))).await.expect("connected");
        working
            .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(named("out"), LogName::outbox()) })
            .await
            .expect("made");
        let event = NewEvent::json("t", "1").tenant("acme").id(EventId::from_key("once").expect("a key"));
        for known in [0, 1] {
            let appended = working.append(&LogName::outbox(), std::slice::from_ref(&event)).await.expect("appended");
            assert_eq!(appended.known(), known, "its owner looks for it, bound as it is");
        }
        let count = async || {
            client.query_one("SELECT count(*) FROM postbox.outbox", &[]).await.expect("asked").get::<_, i64>(0)
        };
        assert_eq!(count().await, 0, "the owner names no tenant");
        store.rebase().await.expect("rebased");
        assert_eq!(count().await, 0, "it is bound again");
        let moved: bool =
            admin.query_one("SELECT bool_and(xid = '3') FROM postbox.outbox", &[]).await.expect("asked").get(0);
        assert!(moved);
        let refused = store.down(false).await.expect_err("there is an event to deliver");
        assert_eq!(refused.code(), "events_undelivered");
        assert_eq!(count().await, 0, "it is bound still");
        let of_a_tool = format!("BEGIN;{}", store.tool_scripts().down);
        let refused = client.batch_execute(&of_a_tool).await.expect_err("there is an event to deliver");
        let message = refused.as_db_error().expect("of the database").message();
        assert_eq!(message, "log outbox holds events that are not delivered");
        client.batch_execute("ROLLBACK").await.expect("rolled back");
        assert_eq!(count().await, 0, "it is bound still");
        store.down(true).await.expect("removed");
        admin
            .batch_execute(&format!("DROP OWNED BY {owner}, {relay}; DROP ROLE {owner}, {relay}"))
            .await
            .expect("cleaned up");
    }
}

/// Its subscriptions still exist: the relay goes on once the printed rights name it again.
#[tokio::test]
async fn a_relay_that_is_named_no_more_does_not_take_its_subscription_for_removed() {
    let server = Postgres::shared(Version::V15).await;
    let url = server.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let relay = format!("unnamed_{}", std::process::id());
    let admin = support::client(&url).await;
    admin.batch_execute(&format!("CREATE ROLE {relay} LOGIN")).await.expect("made");
    let name_for_all = async |role: &str| {
        let roles = Roles { relays: vec![relay.clone()], all_tenants: vec![role.into()], ..Roles::default() };
        admin.batch_execute(&store.grants(&roles).await.expect("printed")).await.expect("granted");
    };
    name_for_all(&relay).await;
    let working = PostgresStore::connect(PostgresConfig::new(url_as(&url, &relay))).await.expect("connected");
    working.subscribe(&Subscription::new(named("out"), LogName::outbox())).await.expect("made");
    let acquire = async |name: &str| {
        working.acquire(&named(name), &OwnerId::new("one").expect("a name"), &[], Duration::from_secs(600)).await
    };
    acquire("out").await.expect("granted");
    name_for_all("postgres").await;
    assert_eq!(acquire("out").await.expect_err("it sees none").code(), "permission_denied");
    assert_eq!(working.subscriptions().await.expect_err("it sees none").code(), "tenant_not_named");
    name_for_all(&relay).await;
    acquire("out").await.expect("granted again");
    assert_eq!(acquire("nobody").await.expect_err("it was never made").code(), "subscription_unknown");
    admin.batch_execute(&format!("DROP OWNED BY {relay}; DROP ROLE {relay}")).await.expect("cleaned up");
}

/// It would look as if nothing were pending in it.
#[tokio::test]
async fn each_log_without_its_policies_is_named() {
    let world = World::new(Version::V15).await;
    let relay = world.store(&world.relay, None).await;
    let operator = world.store(&world.operator, Some("acme")).await;
    let logs = [LogName::outbox(), LogName::inbox()];
    let names = ["outbox", "inbox"].map(named);
    let reader = |log: &LogName| reader_of("acme", log.as_str(), log.clone());
    for log in &logs {
        relay.subscribe(&reader(log)).await.expect("made");
    }
    for log in &logs {
        relay.check_integrity().await.expect("all is seen");
        let bare = format!("DROP POLICY all_tenants ON postbox.{log}; DROP POLICY tenant_reads ON postbox.{log}");
        world.owner.batch_execute(&bare).await.expect("dropped");
        for refused in [
            relay.check_integrity().await,
            relay.subscribe(&reader(log)).await,
            relay.stats(&named(log.as_str())).await.map(drop),
            operator.stats(&named(log.as_str())).await.map(drop),
        ] {
            let error = refused.expect_err("it is hidden");
            assert_eq!(error.code(), "log_hidden");
            assert!(error.message().contains(&format!("log {log}:")), "{error}");
        }
        let counted = relay.stats_of(&names).await;
        assert_eq!(counted.iter().filter(|it| it.is_ok()).count(), 1, "{counted:?}");
        world.grant().await;
    }
    world.end().await;
}

/// Without tenants there are no policies, and somebody turned it on.
#[tokio::test]
async fn a_log_that_row_security_hides_is_named_with_its_cure() {
    let fixture = support::on(Version::V15).await;
    support::leased(&fixture.store, "s").await;
    let enable = "ALTER TABLE postbox.outbox ENABLE ROW LEVEL SECURITY";
    fixture.client().await.batch_execute(enable).await.expect("enabled");
    let error = fixture.store.check_integrity().await.expect_err("it is hidden");
    assert_eq!(error.code(), "log_hidden");
    fixture.by_owner().check_integrity().await.expect("no policy binds the owner");
    let (_, cure) = error.message().split_once("--all-tenants, ").expect("a cure");
    fixture.client().await.batch_execute(cure).await.expect(cure);
    fixture.store.check_integrity().await.expect("cured");
}

/// Relays and writers lock the same tables in different orders.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_policies_are_put_beside_relays_and_writers_at_work() {
    let fixture = support::on(Version::V15).await;
    let store = Arc::new(fixture.store.clone());
    let subscription = Subscription::new(named("out"), LogName::outbox());
    store.subscribe(&subscription).await.expect("made");
    let sink = Arc::new(handler_sink(|_: Delivery| std::future::ready(())));
    let relay = Relay::builder(store.clone(), subscription).sink(sink).build().expect("built");
    let (stop, appended) = (CancellationToken::new(), AtomicU64::new(0));
    let write = async || {
        while !stop.is_cancelled() {
            store.append(&LogName::outbox(), &[NewEvent::json("t", "1")]).await.expect("appended");
            appended.fetch_add(1, Relaxed);
        }
    };
    let roles = Roles { all_tenants: vec![WORKER.into()], ..Roles::default() };
    let (owner, sql) = (fixture.client().await, store.grants(&roles).await.expect("printed"));
    let put = async {
        for turn in 1..=20 {
            owner.batch_execute(&sql).await.unwrap_or_else(|error| panic!("turn {turn}: {error:?}"));
            let all = appended.load(Relaxed);
            while appended.load(Relaxed) == all || relay.metrics().delivered() < all {
                tokio::task::yield_now().await;
            }
        }
        stop.cancel();
    };
    let work = async { tokio::join!(relay.run(stop.clone()), write(), write(), put) };
    let (ran, ..) = tokio::time::timeout(Duration::from_secs(60), work).await.expect("none stands still");
    ran.expect("ran");
    let bound = "SELECT count(*) FROM pg_class WHERE relnamespace = 'postbox'::regnamespace AND relforcerowsecurity";
    assert!(owner.query_one(bound, &[]).await.expect("asked").get::<_, i64>(0) > 10);
    assert_eq!((relay.metrics().leases_lost(), relay.metrics().store_errors()), (0, 0), "no victim of a deadlock");
}

/// Whoever forgets to print the policies again has exposed nothing.
#[tokio::test]
async fn a_log_that_is_made_later_shows_nothing_before_it_has_policies() {
    let world = World::new(Version::V18).await;
    let log = LogName::new("later").expect("a name");
    let owner = world.fixture.by_owner();
    owner.create_log(&log).await.expect("made");
    owner.append(&log, &[NewEvent::json("t", "1").tenant("acme")]).await.expect("as a superuser");
    world.owner.batch_execute(&format!("GRANT SELECT ON postbox.later TO {}", world.reader)).await.expect("granted");
    let reader = world.client(&world.reader).await;
    let look = "SELECT FROM postbox.later";
    assert_eq!(within(&reader, "acme", look).await.expect("looked"), 0);
    world.grant().await;
    assert_eq!(within(&reader, "acme", look).await.expect("looked"), 1);
    assert_eq!(within(&reader, "other", look).await.expect("looked"), 0);
    world.end().await;
}
