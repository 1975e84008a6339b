//! What the owner of the tables does for all tenants, though the policies bind it too.

use postbox_core::{Append as _, Log as _, LogName, Maintain as _, Migrate as _, NewEvent, Subscription};
use postbox_postgres::{PostgresConfig, PostgresStore, Roles};
use postbox_testkit::servers::{Postgres, Version};

use super::super::roles::url_as;
use super::world::{World, named, within};
use crate::support;

/// Whoever moves the rows of one tenant only, or looks whether those are delivered, loses the
/// others'.
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
            .subscribe(&Subscription { lanes: 1, ..Subscription::new(named("out"), LogName::outbox()) })
            .await
            .expect("made");
        working.append(&LogName::outbox(), &[NewEvent::json("t", "1").tenant("acme")]).await.expect("appended");
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
        store.down(true).await.expect("removed");
        admin
            .batch_execute(&format!("DROP OWNED BY {owner}, {relay}; DROP ROLE {owner}, {relay}"))
            .await
            .expect("cleaned up");
    }
}

/// Who forgets to print the policies again has shown nobody anything.
#[tokio::test]
async fn a_log_that_is_made_later_shows_nothing_before_it_has_policies() {
    let world = World::new(Version::V18).await;
    let log = LogName::new("later").expect("a name");
    world.fixture.store.create_log(&log).await.expect("made");
    world.fixture.store.append(&log, &[NewEvent::json("t", "1").tenant("acme")]).await.expect("as a superuser");
    world.owner.batch_execute(&format!("GRANT SELECT ON postbox.later TO {}", world.reader)).await.expect("granted");
    let reader = world.client(&world.reader).await;
    let look = "SELECT FROM postbox.later";
    assert_eq!(within(&reader, "acme", look).await.expect("looked"), 0);
    world.grant().await;
    assert_eq!(within(&reader, "acme", look).await.expect("looked"), 1);
    assert_eq!(within(&reader, "other", look).await.expect("looked"), 0);
    world.end().await;
}
