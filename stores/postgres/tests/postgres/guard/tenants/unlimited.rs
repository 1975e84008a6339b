//! A store for one tenant on a role that no policy limits: it would work on the events of all.

use postbox_core::{
    Admin as _, Append as _, BatchLimit, Change, Criteria, Diagnose as _, Inspect as _, Log as _, LogName,
    Maintain as _, Migrate as _, NewEvent, OwnerId, Receive as _, Replay, Selection, Store as _, Tail as _, Tenant,
};
use postbox_postgres::{PostgresConfig, PostgresStore, Roles};
use postbox_testkit::servers::Version;

use super::world::{LONG, World, inbound, named};
use crate::support::{self, WORKER, url_as};

/// Everything that reads or changes rows of tenants.
async fn refuses(store: &PostgresStore, role: &str) {
    let (mine, outbox, all) = (named("acme-out"), LogName::outbox(), Criteria::default());
    let owner = OwnerId::new("test").expect("a name");
    let limit = BatchLimit { events: 10, payload_bytes: 1_000 };
    for refused in [
        store.subscriptions().await.map(drop),
        store.stats(&mine).await.map(drop),
        store.count(&outbox).await.map(drop),
        store.conflicts(10).await.map(drop),
        store.arrivals(&outbox, 10).await.map(drop),
        store.tail(&outbox, &all, None, limit).await.map(drop),
        store.change(&mine, &Change::Discard, &Selection::default()).await.map(drop),
        store.replay(&mine, &Replay::default()).await.map(drop),
        store.pause(&mine, None).await,
        store.append(&outbox, &[NewEvent::json("t", "1").tenant("acme")]).await.map(drop),
        store.receive(&LogName::inbox(), inbound("acme", "9", "x")).await.map(drop),
        store.acquire(&mine, &owner, &[], LONG).await.map(drop),
    ] {
        let error = refused.expect_err("it is not limited");
        assert_eq!(error.code(), "tenant_not_limited", "{role}: {error}");
        assert!(error.message().contains("remove `tenant` from [store]"), "{role}: {error}");
    }
}

/// The policies are printed and the schema is looked after by roles that they do not limit.
async fn serves_its_owner(store: &PostgresStore) {
    store.up().await.expect("migrated");
    store.validate().await.expect("valid");
    store.check_integrity().await.expect("whole");
    assert_eq!(store.logs().await.expect("listed").len(), 2);
    store.grants(&Roles::default()).await.expect("printed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_is_refused_to_roles_that_work_for_all() {
    for version in Version::ALL {
        let mut world = World::new(version).await;
        world.filled().await;
        // A member of a role has its policies.
        let member = format!("GRANT {} TO {}", world.relay, world.operator);
        let relay = world.store(&world.relay, Some("acme")).await;
        let pooled = world.pooled(&world.relay.clone(), Some("acme")).await;
        let superuser = world.store("postgres", Some("acme")).await;
        for (store, role) in [(&relay, "relay"), (&pooled, "relay behind a pooler"), (&superuser, "superuser")] {
            refuses(store, role).await;
        }
        serves_its_owner(&superuser).await;
        world.store(&world.operator, Some("acme")).await.stats(&named("acme-out")).await.expect("it is limited");
        world.owner.batch_execute(&member).await.expect("granted");
        refuses(&world.store(&world.operator, Some("acme")).await, "member").await;
        // What was refused is asked again.
        world.owner.batch_execute("DROP POLICY all_tenants ON postbox.outbox").await.expect("dropped");
        refuses(&relay, "relay, elsewhere than in one log").await;
        for table in ["inbox", "subscription"] {
            let limit = format!("DROP POLICY all_tenants ON postbox.{table}");
            world.owner.batch_execute(&limit).await.expect("dropped");
        }
        assert_eq!(relay.count(&LogName::outbox()).await.expect("it is limited now").events, 8);
        world.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_is_refused_where_there_are_no_policies() {
    for version in Version::ALL {
        let fixture = support::on(version).await;
        let of_acme = async |url: &str| {
            let config = PostgresConfig { tenant: Tenant::new("acme").ok(), ..PostgresConfig::new(url) };
            PostgresStore::connect(config).await.expect("connected")
        };
        let worker = of_acme(&url_as(&fixture.url, WORKER)).await;
        let owner = of_acme(&fixture.url).await;
        refuses(&worker, WORKER).await;
        refuses(&owner, "owner").await;
        serves_its_owner(&owner).await;
        let roles = Roles { all_tenants: vec!["postgres".into()], ..Roles::default() };
        let printed = owner.grants(&roles).await.expect("printed");
        fixture.client().await.batch_execute(&printed).await.expect("granted");
        assert_eq!(worker.count(&LogName::outbox()).await.expect("it is limited").events, 0);
        refuses(&owner, "owner").await;
    }
}
