//! What a role of one tenant plants, for others to run or to send.

use postbox_core::{
    Admin as _, BatchLimit, DeadLetters as _, Filter, Lease, Log as _, LogName, Maintain as _, OwnerId, Replay,
    Subscription, Tenant,
};
use postbox_postgres::PostgresStore;
use postbox_testkit::servers::Version;

use super::world::{LONG, READERS, TENANTS, World, named, reader_of, within};

/// Makes `text` a type of the writer's own, and calls what runs with the owner's rights. Fails if
/// the type was used.
const TEMPORARY_TYPE: &str = "
CREATE FUNCTION pg_temp.evil(value pg_catalog.text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'runs as %', current_user; END $$;
CREATE DOMAIN pg_temp.text AS pg_catalog.text CHECK (pg_temp.evil(value));
SELECT postbox.outbox_has(gen_random_uuid(), 't', 'k', 'acme', '{}', NULL)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_temporary_type_is_not_used_with_the_owners_rights() {
    for version in Version::ALL {
        let world = World::new(version).await;
        world.client(&world.writer).await.batch_execute(TEMPORARY_TYPE).await.expect("the type is not used");
        let unsafe_ones = "SELECT proname::text, array_to_string(proconfig, ' ') FROM pg_proc
            WHERE pronamespace = 'postbox'::regnamespace
            AND (prosecdef OR proconfig::text LIKE '%search_path%') AND NOT proconfig @> '{\"search_path=pg_catalog, pg_temp\"}'";
        let rows = world.owner.query(unsafe_ones, &[]).await.expect("asked");
        let named: Vec<(String, Option<String>)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        assert_eq!(named, []);
        // Temporary types come first unless the path says otherwise, so the test can fail.
        let exposed = "ALTER FUNCTION postbox.outbox_has SET search_path = pg_catalog";
        world.owner.batch_execute(exposed).await.expect("altered");
        let caught = world.client(&world.writer).await.batch_execute(TEMPORARY_TYPE).await.expect_err("it is used");
        let message = caught.as_db_error().map(|error| error.message().to_owned());
        let owner: String = world.owner.query_one("SELECT current_user::text", &[]).await.expect("asked").get(0);
        assert_eq!(message, Some(format!("runs as {owner}")));
        world.end().await;
    }
}

async fn leased(relay: &PostgresStore, name: &str) -> Lease {
    let owner = OwnerId::new("test").expect("a name");
    relay.acquire(&named(name), &owner, &[], LONG).await.expect("acquired").lease.expect("a free lane")
}

/// A delivery row names its event by a number that anybody can guess.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_operator_plants_sends_no_event_of_another_tenant() {
    for version in Version::ALL {
        let world = World::new(version).await;
        world.filled().await;
        let operator = world.client(&world.operator).await;
        let theirs = "SELECT seq FROM postbox.outbox WHERE tenant <> 'acme' ORDER BY seq DESC LIMIT 2";
        let theirs = world.owner.query(theirs, &[]).await.expect("asked");
        let theirs: Vec<i64> = theirs.iter().map(|row| row.get(0)).collect();
        for (seq, state, due) in [(theirs[0], "retrying", "true"), (theirs[1], "dead", "NULL")] {
            let plant = format!(
                "INSERT INTO postbox.delivery (subscription, seq, lane, key, state, ordered, due_at)
                 SELECT id, {seq}, 0, 'zz', '{state}', true, CASE WHEN {due} THEN now() END
                 FROM postbox.subscription WHERE name = 'acme-out'"
            );
            assert_eq!(within(&operator, TENANTS[0], &plant).await.expect("planted"), 1);
        }
        let relay = world.store(&world.relay, None).await;
        let lease = leased(&relay, "acme-out").await;
        let batch = relay.due(&lease, BatchLimit::default()).await.expect("read");
        let planted = batch.deliveries.iter().find(|it| it.seq.0 == theirs[0]).expect("it is due");
        assert!(planted.event.payload.is_empty() && planted.event.tenant.is_none(), "{planted:?}");
        assert!(batch.unreadable.contains_key(&planted.seq));
        let letters = relay.dead_letters(&lease, BatchLimit::default()).await.expect("read");
        let planted = letters.iter().find(|it| it.delivery.seq.0 == theirs[1]).expect("it is dead");
        assert!(planted.delivery.event.payload.is_empty() && planted.unreadable.is_some(), "{planted:?}");
        // Its own event, and one of whoever had the subscription before, are sent.
        let own = letters.iter().filter(|it| it.delivery.event.tenant.is_some()).count();
        assert_eq!(own, 1);
        relay.release(&lease).await.expect("released");
        let lease = leased(&relay, "moved").await;
        let letters = relay.dead_letters(&lease, BatchLimit::default()).await.expect("read");
        let tenants: Vec<_> = letters.iter().map(|it| it.delivery.event.tenant.as_ref().map(Tenant::as_str)).collect();
        assert_eq!(tenants, [Some(TENANTS[1])], "the subscription moved from that tenant");
        world.end().await;
    }
}

/// Routing is done for all tenants, with a number that an operator of one of them may write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_number_at_its_bound_stops_no_routing() {
    for version in Version::ALL {
        let world = World::new(version).await;
        world.filled().await;
        let operator = world.client(&world.operator).await;
        let bound = "UPDATE postbox.subscription SET replays = 2000000000";
        assert!(within(&operator, TENANTS[0], bound).await.expect("written") > 0);
        let beyond = within(&operator, TENANTS[0], "UPDATE postbox.subscription SET replays = 2147483647").await;
        let relay = world.store(&world.relay, None).await;
        let reader = reader_of(TENANTS[0], READERS[0], LogName::outbox());
        let filter = Filter { topics: Vec::new(), ..reader.filter.clone() };
        relay.subscribe(&Subscription { filter, ..reader }).await.expect("changed");
        while relay.note_unrouted(&LogName::outbox()).await.expect("routed").more {}
        assert!(relay.replay(&named(READERS[0]), &Replay::default()).await.expect("replayed").count > 0);
        assert_eq!(beyond.expect_err("refused").code().map(|state| state.code()), Some("23514"));
        world.end().await;
    }
}

/// One row that cannot be read would fail every command that looks at all subscriptions. One that
/// is far larger than what the store writes would fill the memory of the relay of all tenants.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_that_nobody_can_read_are_refused() {
    for version in Version::ALL {
        let world = World::new(version).await;
        world.filled().await;
        for sql in [
            "UPDATE postbox.subscription SET paused_until = 'infinity'",
            "UPDATE postbox.subscription SET paused_until = '20000-01-01'",
            "UPDATE postbox.subscription SET topics = '{NULL}'",
            "UPDATE postbox.subscription SET topics = '{{a,b},{c,d}}'",
            "UPDATE postbox.subscription SET kinds = '{NULL}'",
            "UPDATE postbox.subscription SET aggregates = '{{a},{b}}'",
            "UPDATE postbox.subscription SET paused_by = repeat('x', 256)",
            "UPDATE postbox.subscription SET paused_why = repeat('x', 2049)",
            "UPDATE postbox.lane SET lease_until = 'infinity'",
            "UPDATE postbox.delivery SET key = repeat('x', 1025)",
            "UPDATE postbox.delivery SET code = repeat('x', 129)",
            "UPDATE postbox.delivery SET error = repeat('x', 2049)",
            "UPDATE postbox.delivery SET last_attempts = to_jsonb(repeat('x', 40000))",
            "UPDATE postbox.delivery SET replays = -1",
            "UPDATE postbox.delivery SET due_at = '-infinity', state = 'scheduled'",
            "UPDATE postbox.conflict SET first_at = 'infinity'",
            "UPDATE postbox.delivery SET updated_at = 'infinity'",
            "INSERT INTO postbox.receipt VALUES ('s', 'acme', 'm', '', '-infinity')",
            "INSERT INTO postbox.once VALUES ('s', 'acme', 'm', 'infinity')",
            "UPDATE postbox.lane SET lease_ttl = 9223372036854775807",
            "UPDATE postbox.lane SET granted_at = 'infinity'",
            "INSERT INTO postbox.replica SELECT id, 'r', 'infinity', 1 FROM postbox.subscription",
            "INSERT INTO postbox.replica SELECT id, 'r', now(), 9223372036854775807 FROM postbox.subscription",
        ] {
            let refused = world.owner.batch_execute(sql).await.expect_err(sql);
            assert_eq!(refused.code().map(|state| state.code()), Some("23514"), "{sql}: {refused:?}");
        }
        world.end().await;
    }
}
