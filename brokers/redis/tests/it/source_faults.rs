//! Groups that several consumers share, groups that are lost, and streams that are trimmed.

use std::time::Duration;

use postbox_core::{ErrorKind, Source as _, SourceMessage};
use postbox_testkit::receiving::{ack, take};
use postbox_testkit::warnings::Warnings;
use tokio::time::timeout;

use super::support::{Broker, LOOK};
use super::{SERVERS, source_with};

async fn add(broker: &Broker, ids: std::ops::RangeInclusive<usize>) {
    for id in ids {
        let _: String = broker.ask(&format!("XADD events * id {id} topic t payload {id}")).await;
    }
}

fn ids(taken: &[SourceMessage]) -> Vec<String> {
    taken.iter().map(|it| it.message.message_id()).collect()
}

async fn pending(broker: &Broker) -> usize {
    let (pending, ..): (usize, redis::Value, redis::Value, redis::Value) = broker.ask("XPENDING events postbox").await;
    pending
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_pending_comes_first_after_a_restart() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let before = source_with(&broker, |_| ());
        add(&broker, 1..=3).await;
        let taken = take(&before, 3).await;
        ack(&before, &taken[1..2]).await;
        drop((before, taken));
        add(&broker, 4..=4).await;
        let after = source_with(&broker, |_| ());
        let taken = take(&after, 3).await;
        assert_eq!(ids(&taken), ["1", "3", "4"], "a group begins with the first entry, and keeps its place");
        ack(&after, &taken).await;
        assert_eq!(pending(&broker).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_another_consumer_left_is_taken_over() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let gone = source_with(&broker, |config| config.consumer = "gone".into());
        add(&broker, 1..=5).await;
        assert_eq!(take(&gone, 5).await.len(), 5);
        gone.close().await;
        let next = source_with(&broker, |config| {
            config.consumer = "next".into();
            config.claim_after = Duration::from_secs(1);
            // Claiming the entries takes more than one call.
            config.in_flight = 3;
        });
        let mut all = Vec::new();
        while all.len() < 5 {
            let taken = take(&next, 1).await;
            ack(&next, &taken).await;
            all.extend(ids(&taken));
        }
        assert_eq!(all, ["1", "2", "3", "4", "5"]);
        assert_eq!(pending(&broker).await, 0);
    }
}

#[tokio::test]
async fn what_was_trimmed_before_it_was_received_is_counted_and_said() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let before = source_with(&broker, |_| ());
        add(&broker, 1..=5).await;
        take(&before, 3).await;
        before.close().await;
        let (warnings, _guard) = Warnings::hear();
        let _: usize = broker.ask("XTRIM events MAXLEN 3").await;
        let after = source_with(&broker, |_| ());
        let taken = take(&after, 3).await;
        assert_eq!(ids(&taken), ["3", "4", "5"]);
        assert_eq!(after.trimmed(), 2);
        assert_eq!(warnings.all().iter().filter(|line| line.contains("trimmed")).count(), 1, "{:?}", warnings.all());
        ack(&after, &taken).await;
        assert_eq!(pending(&broker).await, 0, "they are not pending for ever");
        // The same for pending entries of another consumer.
        let gone = source_with(&broker, |config| config.consumer = "gone".into());
        add(&broker, 6..=7).await;
        take(&gone, 2).await;
        gone.close().await;
        let _: usize = broker.ask("XTRIM events MAXLEN 0").await;
        add(&broker, 8..=8).await;
        let next = source_with(&broker, |config| config.claim_after = Duration::from_secs(1));
        let taken = take(&next, 1).await;
        assert_eq!(ids(&taken), ["8"]);
        ack(&next, &taken).await;
        while next.trimmed() < 2 {
            let waited = timeout(Duration::from_millis(300), next.next(1)).await;
            assert!(waited.is_err(), "{waited:?}");
        }
        assert_eq!(pending(&broker).await, 0);
    }
}

/// A group is lost if the stream is deleted, or if the server is a copy that never had it.
#[tokio::test]
async fn a_lost_group_is_made_again_from_what_is_remembered() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let source = source_with(&broker, |_| ());
        add(&broker, 1..=4).await;
        let taken = take(&source, 4).await;
        ack(&source, &taken[..2]).await;
        let (warnings, _guard) = Warnings::hear();
        let _: usize = broker.ask("XGROUP DESTROY events postbox").await;
        add(&broker, 5..=5).await;
        let again = take(&source, 3).await;
        assert_eq!(ids(&again), ["1", "2", "5"], "what is given out does not come again while it is ours");
        ack(&source, &again[..2]).await;
        assert!(warnings.all().iter().any(|line| line.contains("consumer group was lost")), "{:?}", warnings.all());
        // The connections are lost, too. Messages that were not stored are delivered again by the
        // new group.
        broker.proxy.reset();
        broker.settle(|| !source.is_connected()).await;
        let again = take(&source, 3).await;
        assert_eq!(ids(&again), ["3", "4", "5"]);
        ack(&source, &again).await;
        let _: usize = broker.ask("DEL events").await;
        add(&broker, 6..=6).await;
        assert_eq!(ids(&take(&source, 1).await), ["6"]);
    }
}

/// A lost group takes with it what other consumers had not stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_another_consumer_left_in_a_lost_group_comes_again() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let gone = source_with(&broker, |config| config.consumer = "gone".into());
        add(&broker, 1..=3).await;
        assert_eq!(take(&gone, 3).await.len(), 3);
        gone.close().await;
        let source = source_with(&broker, |_| ());
        add(&broker, 4..=5).await;
        let taken = take(&source, 2).await;
        assert_eq!(ids(&taken), ["4", "5"]);
        ack(&source, &taken).await;
        let _: usize = broker.ask("XGROUP DESTROY events postbox").await;
        let all = take(&source, 5).await;
        assert_eq!(ids(&all), ["1", "2", "3", "4", "5"]);
        ack(&source, &all).await;
        assert_eq!(pending(&broker).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_killed_and_comes_back_loses_no_message() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let source = source_with(&broker, |_| ());
        add(&broker, 1..=50).await;
        let taken = take(&source, 50).await;
        ack(&source, &taken[..25]).await;
        {
            let mut server = broker.server.lock().await;
            server.kill();
            broker.settle(|| !source.is_connected()).await;
            let error = source.next(1).await.expect_err("nobody is there");
            assert_eq!((error.kind(), error.code()), (ErrorKind::Unavailable, "redis_connect_failed"));
            server.start().await;
        }
        let again = take(&source, 25).await;
        assert_eq!(ids(&again), ids(&taken[25..]));
        ack(&source, &again).await;
        assert_eq!(pending(&broker).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_of_others_come_whole() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let source = source_with(&broker, |config| config.topic = Some("orders".into()));
        let _: String = broker.ask("XADD events 5-1 state paid id 42").await;
        let mut odd = redis::cmd("XADD");
        odd.arg("events").arg("5-2").arg(b"\xff").arg(b"\xfe");
        let _: String = odd.query_async(&mut broker.connection().await).await.expect("added");
        let taken = take(&source, 2).await;
        let [flat, odd] = [&taken[0].message, &taken[1].message];
        assert_eq!((flat.id.as_deref(), flat.topic.as_str()), (Some("events/5-1"), "orders"));
        assert_eq!(flat.payload, r#"{"id":"42","state":"paid"}"#);
        assert_eq!((odd.payload.as_ref(), odd.topic.as_str()), (&b"\xff=\xfe\n"[..], ""));
        let name = "events".parse().expect("a name");
        assert!(odd.clone().into_inbound(&name).is_err(), "it is kept as poison");
    }
}

#[tokio::test]
async fn a_stream_of_another_type_is_for_a_person_to_mend() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let () = broker.ask("SET events text").await;
        let source = source_with(&broker, |_| ());
        let error = source.next(1).await.expect_err("no stream");
        assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "redis_wrong_type"));
        let _: usize = broker.ask("DEL events").await;
        add(&broker, 1..=1).await;
        assert_eq!(ids(&take(&source, 1).await), ["1"]);
    }
}

/// A dropped call leaves the server's answer to the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dropped_call_would_have_given_the_next_one_gives() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let source = source_with(&broker, |_| ());
        for n in 1..=20 {
            // The call is dropped while the server waits for entries. Its answer arrives when no
            // call waits for it.
            let waited = timeout(3 * LOOK, source.next(1)).await;
            assert!(waited.is_err(), "{waited:?}");
            add(&broker, n..=n).await;
            let taken = take(&source, 1).await;
            assert_eq!(ids(&taken), [n.to_string()]);
            ack(&source, &taken).await;
        }
    }
}
