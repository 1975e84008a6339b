//! An event that is already in the log is not appended again.

use postbox_core::{Append as _, EventId, LogName, NewEvent};
use postbox_testkit::servers::Version;
use tokio_postgres::error::SqlState;
use tokio_postgres::{AsyncMessage, Client, IsolationLevel, NoTls};

use crate::support::{self, Fixture};

fn paid() -> NewEvent {
    NewEvent::json("order.paid", r#"{"order":42}"#).id(of_key("order-42-paid"))
}

fn of_key(key: &str) -> EventId {
    EventId::from_key(key).expect("a key")
}

async fn count(fixture: &Fixture) -> i64 {
    let count = "SELECT count(*) FROM postbox.outbox";
    fixture.client().await.query_one(count, &[]).await.expect("counted").get(0)
}

/// Whether the event is in the log is unknown until the first transaction ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_transaction_waits_for_the_first_and_then_knows() {
    use IsolationLevel::{ReadCommitted, RepeatableRead};
    for version in Version::ALL {
        for (isolation, commits, expected) in [
            (ReadCommitted, true, Ok(1)),
            (ReadCommitted, false, Ok(0)),
            (RepeatableRead, true, Err("store_contention")),
            (RepeatableRead, false, Ok(0)),
        ] {
            for events in [vec![paid()], vec![NewEvent::json("t", "1"), paid()]] {
                let fixture = support::on(version).await;
                let (postbox, mut client) = (fixture.store.postbox(), fixture.client().await);
                let mut first = client.transaction().await.expect("begun");
                assert!(postbox.append(&mut first, paid()).await.expect("appended").is_new());
                let (mut client, of_second) = (fixture.client().await, postbox.clone());
                let second = tokio::spawn(async move {
                    let begin = client.build_transaction().isolation_level(isolation);
                    let mut tx = begin.start().await.expect("begun");
                    let known = of_second.append(&mut tx, events).await?.known();
                    of_second.append(&mut tx, NewEvent::json("t", "2")).await?;
                    tx.commit().await.expect("committed");
                    Ok(known)
                });
                support::until_waited_for(first.client()).await;
                if commits {
                    first.commit().await.expect("committed");
                } else {
                    first.rollback().await.expect("rolled back");
                }
                let known = second.await.expect("no panic");
                let known = known.as_ref().map(|known| *known).map_err(|error: &postbox_core::Error| error.code());
                assert_eq!(known, expected, "{isolation:?}, committed: {commits}");
            }
        }
    }
}

/// A violation of the owner's own unique index is reported as such, whatever id the event has.
#[tokio::test]
async fn what_breaks_another_rule_is_not_known() {
    let fixture = support::on(Version::V15).await;
    let rule = "CREATE UNIQUE INDEX one_of_each ON postbox.outbox (aggregate, version)";
    fixture.client().await.batch_execute(rule).await.expect("made");
    let of_order = |id: &str| NewEvent::json("t", "1").aggregate("order").version(1).id(of_key(id));
    let append = async |events: &[NewEvent]| fixture.store.append(&LogName::outbox(), events).await;
    append(&[of_order("1")]).await.expect("appended");
    assert_eq!(append(&[of_order("1")]).await.expect("known").known(), 1);
    for events in [vec![of_order("2")], vec![NewEvent::json("t", "2"), of_order("2")]] {
        assert_eq!(append(&events).await.expect_err("refused").code(), "unique_violation");
    }
    assert_eq!(count(&fixture).await, 1);
}

/// Retention deleted the event before it was looked up, and another producer has appended it since.
#[tokio::test]
async fn what_comes_and_goes_meanwhile_is_looked_for_again() {
    for version in Version::ALL {
        for (events, looks) in [(vec![paid()], 1), (vec![paid(), NewEvent::json("t", "1")], 2)] {
            let fixture = support::on(version).await;
            fixture.store.append(&LogName::outbox(), &[paid()]).await.expect("appended");
            let gone_at_first = format!(
                "CREATE SEQUENCE looks;
                 CREATE OR REPLACE FUNCTION postbox.outbox_has(
                   event_id uuid, of_topic text, of_key text, of_tenant text, of_payload text, of_bytes bytea)
                 RETURNS boolean LANGUAGE sql VOLATILE SECURITY DEFINER AS $$ SELECT nextval('public.looks') > {looks} $$"
            );
            fixture.client().await.batch_execute(&gone_at_first).await.expect("made");
            let appended = fixture.store.append(&LogName::outbox(), &events).await.expect("known");
            assert_eq!(appended.known(), 1);
            assert_eq!(count(&fixture).await, events.len() as i64);
        }
    }
}

#[tokio::test]
async fn a_key_has_the_same_id_in_rust_and_in_sql() {
    for version in Version::ALL {
        let fixture = support::on(version).await;
        let client = fixture.client().await;
        for key in ["order-42-paid", "\u{a0}", "acme/\u{fc}n\u{ef} \u{1f600}", r"a'b\c", &"k".repeat(10_000)] {
            let sql = "SELECT postbox.event_id($1)";
            let id: uuid::Uuid = client.query_one(sql, &[&key]).await.expect("made").get(0);
            assert_eq!(EventId::from_uuid(id), of_key(key));
            assert_eq!((id.get_version_num(), id.get_variant()), (8, uuid::Variant::RFC4122));
        }
        let refused = client.batch_execute("SELECT postbox.event_id('order-' || NULL)").await.expect_err("no key");
        assert_eq!(refused.code(), Some(&SqlState::NULL_VALUE_NOT_ALLOWED));
        for key in ["", " ", " \t\r\n\u{c}"] {
            assert_eq!(EventId::from_key(key).expect_err("no key").code(), "idempotency_key_blank");
            let refused = client.query_one("SELECT postbox.event_id($1)", &[&key]).await.expect_err("no key");
            assert_eq!(refused.code(), Some(&SqlState::INVALID_PARAMETER_VALUE));
        }
    }
}

/// Payloads are compared by their bytes, whatever type they are passed or stored as.
#[tokio::test]
async fn the_same_bytes_are_the_same_event_as_text_and_as_bytea() {
    for version in Version::ALL {
        let fixture = support::on(version).await;
        let client = fixture.client().await;
        let enqueue = |payload: &str, key: &str| {
            format!(
                "SELECT postbox.enqueue('t', {payload}, content_type => 'text/plain', id => postbox.event_id('{key}'))"
            )
        };
        for (n, [first, second]) in [["'hello'", "'hello'::bytea"], ["'hello'::bytea", "'hello'"]].iter().enumerate() {
            let key = format!("key {n}");
            for payload in [first, second] {
                client.query_one(&enqueue(payload, &key), &[]).await.expect("appended or known");
            }
            let event = NewEvent::new("t", "hello", "text/plain").id(of_key(&key));
            let appended = fixture.store.append(&LogName::outbox(), &[event]).await.expect("known");
            assert_eq!(appended.known(), 1, "{first}");
            let other = client.query_one(&enqueue("'hallo'::bytea", &key), &[]).await.expect_err("another event");
            assert_eq!(other.code(), Some(&SqlState::UNIQUE_VIOLATION));
        }
        assert_eq!(count(&fixture).await, 2);
    }
}

/// A connection, and the notices that the server sends on it.
async fn listening(url: &str) -> (Client, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let (client, mut connection) = tokio_postgres::connect(url, NoTls).await.expect("connected");
    let (noted, notices) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notice(notice) = message {
                let _ = noted.send(notice.message().to_owned());
            }
        }
    });
    (client, notices)
}

#[tokio::test]
async fn enqueue_says_that_an_event_is_there_already() {
    for version in Version::ALL {
        let fixture = support::on(version).await;
        let (client, mut notices) = listening(&fixture.url).await;
        // Neither setting changes what a time means.
        let settings = "SET datestyle = 'SQL, DMY'; SET timezone = 'Asia/Kolkata'; SELECT postbox.create_log('third')";
        client.batch_execute(settings).await.expect("set");
        let payloads =
            [r#"'{"n":1}'"#, r#"'{"n":1}'::jsonb"#, r"E'\\x41', content_type => 'a/b'", r"E'\\x00ff'::bytea"];
        for log in ["outbox", "third"] {
            for (n, payload) in payloads.iter().enumerate() {
                let id = of_key(&format!("event {n}"));
                let enqueue = format!(
                    "SELECT postbox.enqueue('t', {payload}, key => 7, id => postbox.event_id('event {n}'), headers => '{{\"a\":\"b\"}}',
                       occurred_at => '2026-02-01 03:04:05.000006+07', deliver_at => '2001-02-03 04:05:06Z', log => '{log}')"
                );
                for is_new in [true, false] {
                    let given: uuid::Uuid = client.query_one(&enqueue, &[]).await.expect("enqueued").get(0);
                    assert_eq!(given, id.as_uuid());
                    let said = notices.try_recv().ok();
                    let expected = format!("event {id} is in the log {log} already: not appended again");
                    assert_eq!(said, (!is_new).then_some(expected));
                }
                let other = enqueue.replace("key => 7", "key => 8");
                let refused = client.query_one(&other, &[]).await.expect_err("another event");
                let refused = refused.as_db_error().expect("of the database");
                assert_eq!(refused.code(), &SqlState::UNIQUE_VIOLATION);
                assert_eq!(refused.constraint(), Some(format!("{log}_id_key").as_str()));
                assert!(refused.hint().is_some_and(|hint| hint.contains("its own id")), "{refused:?}");
            }
            let as_said = format!(
                "SELECT count(*) FROM postbox.{log} WHERE occurred_at = '2026-01-31 20:04:05.000006Z' AND deliver_at = '2001-02-03 04:05:06Z'
                   AND headers = '{{\"a\":\"b\"}}' AND key = '7' AND expires_at IS NULL"
            );
            assert_eq!(client.query_one(&as_said, &[]).await.expect("counted").get::<_, i64>(0), 4);
        }
        let missing = "SELECT postbox.enqueue('t', '1', id => gen_random_uuid(), log => 'nowhere')";
        let refused = client.batch_execute(missing).await.expect_err("there is no such log");
        assert_eq!(refused.code(), Some(&SqlState::UNDEFINED_TABLE));
    }
}
