//! Servers that crash, come back empty, run out of memory, or do not answer.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{HighWaterMarks as _, NewEvent, Sink};
use postbox_testkit::servers::PrivateRedis;
use postbox_testkit::sink_faults::{self, Stored, whole_and_in_order};

use super::support::{Broker, LOOK, text};
use super::{PATIENCE, SERVERS, codes, deliver, deliveries, numbered, sink, sink_with};

async fn arrived(broker: &Broker) -> Vec<Stored> {
    let entries = broker.entries("events").await;
    entries.iter().map(|entry| (text(entry, "id").expect("an id"), text(entry, "payload").expect("text"))).collect()
}

/// Events that were reported as delivered are stored. The others are sent again until they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_killed_under_load_loses_nothing_it_acknowledged() {
    for kind in SERVERS {
        // With the default, a server whose disk is busy answers before it writes.
        let durable = ["--appendfsync", "always"];
        let broker = Broker::of(PrivateRedis::launch_with(kind, &durable).await).await;
        let mut server = broker.server.lock().await;
        let appended = sink_faults::kill_under_load(Arc::new(sink(&broker)), &mut server, 4).await;
        whole_and_in_order(&arrived(&broker).await, appended);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_comes_back_empty_takes_events_again() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let sink = sink(&broker);
        assert_eq!(codes(&deliver(&sink, &numbered(3)).await), ["delivered"]);
        let mut server = broker.server.lock().await;
        server.kill();
        broker.settle(|| !sink.is_connected()).await;
        assert_eq!(codes(&deliver(&sink, &numbered(3)).await), ["unavailable redis_connect_failed"]);
        server.empty();
        server.start().await;
        assert_eq!(codes(&deliver(&sink, &numbered(2)).await), ["delivered"]);
        assert_eq!(arrived(&broker).await.len(), 2, "the others are lost, and Redis said so to nobody");
    }
}

/// The entry is stored, but the answer is lost. Sent again, the event is stored twice with the same
/// id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_lost_is_ambiguous_and_never_sent_again_in_secret() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let sink: Arc<dyn Sink> = Arc::new(sink(&broker));
        let said = ["ambiguous redis_connection_lost", "delivered"];
        sink_faults::an_answer_is_lost(&sink, &broker.proxy, 100, said, async || arrived(&broker).await).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_black_hole_is_ambiguous_and_then_an_outage() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let limit = Duration::from_secs(1);
        let sink: Arc<dyn Sink> = Arc::new(sink_with(&broker, limit, |_| ()));
        let said = ["ambiguous redis_timeout", "unavailable redis_connect_timeout"];
        sink_faults::a_black_hole(&sink, &broker.proxy, limit, said, async || arrived(&broker).await).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_was_lost_meanwhile_is_made_again_by_the_next_call() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let sink: Arc<dyn Sink> = Arc::new(sink(&broker));
        sink_faults::connections_are_lost(&sink, &broker.proxy, "redis_connection_lost").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_says_nothing_costs_a_deadline() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let sink = sink_with(&broker, Duration::from_secs(1), |_| ());
        assert_eq!(codes(&deliver(&sink, &numbered(1)).await), ["delivered"]);
        broker.server.lock().await.freeze();
        assert_eq!(codes(&deliver(&sink, &numbered(2)).await), ["ambiguous redis_timeout"]);
        assert_eq!(codes(&deliver(&sink, &numbered(2)).await), ["unavailable redis_connect_timeout"]);
        broker.server.lock().await.thaw();
        assert_eq!(codes(&deliver(&sink, &numbered(1)).await), ["delivered"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_memory_is_unavailable_until_it_has_some() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let sink = sink(&broker);
        let () = broker.ask("CONFIG SET maxmemory 1").await;
        assert_eq!(codes(&deliver(&sink, &numbered(3)).await), ["unavailable redis_out_of_memory"]);
        let () = broker.ask("CONFIG SET maxmemory 0").await;
        assert_eq!(codes(&deliver(&sink, &numbered(3)).await), ["delivered"]);
        assert_eq!(arrived(&broker).await.len(), 3);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_stream_refuses_no_other_event_pays_for() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let sink = sink_with(&broker, PATIENCE, |config| config.stream = "s:{topic}".parse().expect("a template"));
        let () = broker.ask("SET s:taken text").await;
        let events = ["a", "taken", "b"].map(|topic| NewEvent::json(topic, "{}"));
        let outcomes = deliver(&sink, &deliveries(events)).await;
        let expected = ["delivered", "ambiguous redis_wrong_type", "delivered"];
        assert_eq!(codes(&outcomes), expected);
        // With `make_stream = false` the server answers nil, which does not count as delivered.
        let sink = sink_with(&broker, PATIENCE, |config| {
            config.stream = "s:{topic}".parse().expect("a template");
            config.make_stream = false;
        });
        let outcomes = deliver(&sink, &deliveries(["a", "new"].map(|topic| NewEvent::json(topic, "{}")))).await;
        assert_eq!(codes(&outcomes), ["delivered", "ambiguous redis_stream_missing"]);
        assert_eq!(broker.ask::<usize>("EXISTS s:new").await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_is_trimmed_to_about_its_length() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let sink = sink_with(&broker, PATIENCE, |config| config.maxlen = Some(250));
        assert_eq!(codes(&deliver(&sink, &numbered(1_000)).await), ["delivered"]);
        let length: usize = broker.ask("XLEN events").await;
        assert!((250..=350).contains(&length), "{length}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_need_their_password_and_their_rights() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let () = broker.ask("ACL SETUSER writer on >secret ~events +xadd +hello +client").await;
        let with = |password: &str, stream: &str| {
            sink_with(&broker, PATIENCE, |config| {
                config.user = Some("writer".into());
                config.password = Some(postbox_config::Secret::new(password));
                config.stream = stream.parse().expect("a template");
            })
        };
        let wrong = deliver(&with("wrong", "events"), &numbered(1)).await;
        assert_eq!(codes(&wrong), ["unavailable redis_unauthorized"]);
        assert!(!format!("{wrong:?}").contains("\"wrong\""), "{wrong:?}");
        assert_eq!(codes(&deliver(&with("secret", "events"), &numbered(1)).await), ["delivered"]);
        assert_eq!(codes(&deliver(&with("secret", "other"), &numbered(1)).await), ["ambiguous redis_not_permitted"]);
        let in_database_1 = || {
            sink_with(&broker, PATIENCE, |config| {
                config.url.push_str("/1");
                config.user = Some("writer".into());
                config.password = Some(postbox_config::Secret::new("secret"));
            })
        };
        let refused = deliver(&in_database_1(), &numbered(1)).await;
        assert_eq!(codes(&refused), ["unavailable redis_not_permitted"], "no right to SELECT");
        let () = broker.ask("ACL SETUSER writer +select").await;
        assert_eq!(codes(&deliver(&in_database_1(), &numbered(1)).await), ["delivered"]);
        let () = broker.ask("CONFIG SET requirepass needed").await;
        assert_eq!(codes(&deliver(&sink(&broker), &numbered(1)).await), ["unavailable redis_unauthorized"]);
    }
}

/// A failover loses entries that the replica had not received, although they were acknowledged. The
/// rest is kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_is_promoted_takes_over_with_what_it_had() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let primary = sink(&broker);
        assert_eq!(codes(&deliver(&primary, &numbered(10)).await), ["delivered"]);
        let port = broker.server.lock().await.port();
        let replica =
            Broker::of(PrivateRedis::launch_with(kind, &["--replicaof", &format!("127.0.0.1 {port}")]).await).await;
        while !replica.ask::<String>("INFO replication").await.contains("master_link_status:up") {
            tokio::time::sleep(LOOK).await;
        }
        assert_eq!(replica.ask::<usize>("XLEN events").await, 10);
        let promoted = sink(&replica);
        assert_eq!(codes(&deliver(&promoted, &numbered(1)).await), ["unavailable redis_readonly"]);
        // From here on the replica receives nothing.
        replica.server.lock().await.freeze();
        assert_eq!(codes(&deliver(&primary, &numbered(5)).await), ["delivered"]);
        broker.server.lock().await.kill();
        replica.server.lock().await.thaw();
        let () = replica.ask("REPLICAOF NO ONE").await;
        assert_eq!(codes(&deliver(&promoted, &numbered(1)).await), ["delivered"]);
        let kept = replica.ask::<usize>("XLEN events").await;
        assert!((11..=16).contains(&kept), "{kept}");
    }
}

/// A server becomes a replica while a connection is open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_is_demoted_is_unavailable() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let sink = sink(&broker);
        assert_eq!(codes(&deliver(&sink, &numbered(1)).await), ["delivered"]);
        let () = broker.ask("REPLICAOF 127.0.0.1 1").await;
        assert_eq!(codes(&deliver(&sink, &numbered(1)).await), ["unavailable redis_readonly"]);
        let () = broker.ask("REPLICAOF NO ONE").await;
        assert_eq!(codes(&deliver(&sink, &numbered(1)).await), ["delivered"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_high_water_mark_is_the_last_entry_also_of_a_trimmed_stream() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let sink = sink(&broker);
        assert_eq!(codes(&deliver(&sink, &numbered(3)).await), ["delivered"]);
        let entries: Vec<(String, redis::Value)> = broker.ask("XREVRANGE events + - COUNT 1").await;
        let _: usize = broker.ask("XTRIM events MAXLEN 0").await;
        assert_eq!(sink.high_water_mark("events").await.expect("an answer"), Some(entries[0].0.clone()));
        let () = broker.ask("SET events:text text").await;
        let error = sink.high_water_mark("events:text").await.expect_err("no stream");
        assert_eq!(error.code(), "redis_wrong_type");
        for topic in ["b", "a", "[c]"] {
            let _: String = broker.ask(&format!("XADD events:{topic} * a 1")).await;
        }
        let by_topic = sink_with(&broker, PATIENCE, |config| config.stream = "events:{topic}".parse().expect("right"));
        assert_eq!(by_topic.streams(9).await.expect("an answer"), ["events:[c]", "events:a", "events:b"]);
        assert_eq!(by_topic.streams(2).await.expect("an answer").len(), 2);
    }
}
