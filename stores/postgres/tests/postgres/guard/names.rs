//! A log may have any SQL keyword as its name. A name that is taken is refused.

use std::time::Duration;

use postbox_core::{
    Append as _, BatchLimit, Inbound, Log as _, LogName, Maintain as _, Migrate as _, NewEvent, OwnerId, Prune,
    Receive as _, Received, Settlement, SourceName, Subscription, SubscriptionName,
};
use postbox_testkit::conformance::StoreFixture as _;
use postbox_testkit::servers::Version;

use crate::support;

#[tokio::test]
async fn a_log_may_be_called_like_a_reserved_word() {
    for version in Version::ALL {
        let fixture = support::on(version).await;
        let (store, owner, client) = (&fixture.store, fixture.by_owner(), fixture.client().await);
        for name in
            ["select", "user", "order", "table", "all", "end", "column", "null", "current_user", "window", "limit"]
        {
            let log: LogName = name.parse().expect("a log's name");
            owner.create_log(&log).await.expect(name);
            owner.create_log(&log).await.expect("idempotent");
            fixture.grant().await;
            store.append(&log, &[NewEvent::json("t", "1").key("k")]).await.expect(name);
            client
                .batch_execute(&format!("SELECT postbox.enqueue('t', '2', key => 'k', log => '{name}')"))
                .await
                .expect(name);
            let inbound = Inbound {
                source: SourceName::new("hooks").expect("a name"),
                message_id: name.to_owned(),
                digest: [0; 32],
                event: NewEvent::json("in", "3").key("k"),
            };
            let received = store.receive(&log, inbound).await.expect(name);
            assert!(matches!(received, Received::Accepted(_)));
            let subscription = SubscriptionName::new(format!("of-{name}")).expect("a name");
            store
                .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(subscription.clone(), log.clone()) })
                .await
                .expect(name);
            let relay = OwnerId::new("test").expect("a name");
            let ttl = Duration::from_secs(600);
            let lease = store.acquire(&subscription, &relay, &[], ttl).await.expect(name).lease.expect("a free lane");
            let batch = store.next_batch(&lease, BatchLimit::default()).await.expect(name);
            assert_eq!(batch.deliveries.len(), 3, "{name}");
            let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
            store.settle(&lease, settlement).await.expect(name);
            store.release(&lease).await.expect(name);
            assert_eq!(store.prune(&log, &Prune::default()).await.expect(name).count, 3);
        }
        // The other way round, a part of the log would have a name that is taken.
        for taken in ["half_dead", "a_state", "b_pkey", "c_id_key", "d_seq_seq", "e_xid_seq"] {
            client.batch_execute(&format!("SELECT postbox.create_log('{taken}')")).await.expect(taken);
        }
        for name in [
            "a",
            "b",
            "c",
            "d",
            "e",
            "create",
            "lane",
            "stats",
            "outbox_dead",
            "half",
            "outbox_pkey",
            "outbox_seq_seq",
            "select_xid_seq",
            "delivery_due",
        ] {
            let refused = client.batch_execute(&format!("SELECT postbox.create_log('{name}')")).await.expect_err(name);
            let constraint = refused.as_db_error().and_then(|said| said.constraint());
            assert_eq!(constraint, Some("log_name_invalid"), "{name}: {refused:?}");
        }
        owner.rebase().await.expect("rebased");
        owner.down(false).await.expect("everything is delivered");
        let left = "SELECT count(*) FROM pg_proc WHERE pronamespace = to_regnamespace('postbox')";
        assert_eq!(client.query_one(left, &[]).await.expect("asked").get::<_, i64>(0), 0);
    }
}
