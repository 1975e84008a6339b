//! A role with every right on the table cannot set the columns that belong to the store. The
//! owner can erase what an event carries.

use postbox_testkit::servers::Version;

use crate::support;

#[tokio::test]
async fn what_the_store_goes_by_cannot_be_forged() {
    for version in Version::ALL {
        let fixture = support::on(version).await;
        let owner = fixture.client().await;
        let role = format!("forger_{}_{}", version.number(), std::process::id());
        owner
            .batch_execute(&format!(
                "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA postbox TO {role}; GRANT ALL ON postbox.outbox TO {role}"
            ))
            .await
            .expect("a role");
        let forger = support::client(&fixture.url).await;
        forger.batch_execute(&format!("SET SESSION AUTHORIZATION {role}")).await.expect("as the forger");
        let good = "INSERT INTO postbox.outbox (topic, payload) VALUES ('t', '')";
        forger.batch_execute(good).await.expect("an honest row");
        let seq = |value: &str| format!("(seq, topic, payload) OVERRIDING SYSTEM VALUE VALUES ({value}, 't', '')");
        let column = |name: &str, value: &str| format!("({name}, topic, payload) VALUES ({value}, 't', '')");
        for (values, code) in [
            (column("xid", "'0'"), "xid_forged"),
            (column("xid", "'3'"), "xid_forged"),
            (column("xid", "(pg_current_xact_id()::text::bigint + 1)::text::xid8"), "xid_forged"),
            (column("xid", "'18446744073709551615'"), "xid_forged"),
            (seq("0"), "seq_forged"),
            (seq("-9223372036854775808"), "seq_forged"),
            (seq("9223372036854775807"), "seq_forged"),
            (seq("1000"), "seq_forged"),
            (column("created_at", "'infinity'"), "created_at_invalid"),
            (column("created_at", "'-infinity'"), "created_at_invalid"),
            (column("created_at", "'290000-01-01'"), "created_at_invalid"),
            (column("created_at", "'1999-12-31 00:00:00+00'"), "created_at_invalid"),
            (column("created_at", "now() + interval '25 hours'"), "created_at_invalid"),
        ] {
            let sql = format!("INSERT INTO postbox.outbox {values}");
            let refused = forger.batch_execute(&sql).await.expect_err(&sql);
            assert_eq!(refused.as_db_error().and_then(|said| said.constraint()), Some(code), "{sql}: {refused:?}");
        }
        // Honest rows are accepted in a transaction with savepoints, as a prepared statement and by
        // COPY.
        forger
            .batch_execute(&format!("BEGIN; {good}; SAVEPOINT a; {good}; ROLLBACK TO a; {good}; COMMIT"))
            .await
            .expect("savepoints");
        let update = "UPDATE postbox.outbox SET xid = '3'";
        let refused = forger.batch_execute(update).await.expect_err("an event does not change");
        assert_eq!(refused.as_db_error().and_then(|said| said.constraint()), Some("xid_forged"));
        let elsewhere = support::client(&fixture.url).await;
        elsewhere.batch_execute(&format!("SET SESSION AUTHORIZATION {role}")).await.expect("as the forger");
        let unheard = format!("INSERT INTO postbox.outbox {}", seq("1000"));
        elsewhere.batch_execute(&unheard).await.expect_err("a session that has drawn no number");
        elsewhere.batch_execute("SELECT nextval('postbox.outbox_seq_seq')").await.expect_err("nobody draws numbers");
        let count: i64 = owner.query_one("SELECT count(*) FROM postbox.outbox", &[]).await.expect("asked").get(0);
        assert_eq!(count, 3);
        owner.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.expect("cleaned up");
    }
}

/// The guide's statements leave nothing of what an event carried, and the rule is back.
#[tokio::test]
async fn events_are_erased_as_the_guide_says() {
    let erase = support::sql_of_roles("DROP CONSTRAINT event_invalid");
    let fixture = support::on(Version::V15).await;
    let owner = fixture.client().await;
    owner
        .batch_execute(
            r#"INSERT INTO postbox.outbox (topic, key, payload, payload_bytes, headers) VALUES
                 ('t', 'customer-42', '"Ann"', NULL, NULL),
                 ('t', 'customer-42', NULL, 'Ann', '{"mail": "ann@example.com"}')"#,
        )
        .await
        .expect("appended");
    owner.batch_execute(erase).await.expect("erased");
    let erased =
        "SELECT count(*) FROM postbox.outbox WHERE payload = '{}' AND payload_bytes IS NULL AND headers IS NULL";
    assert_eq!(owner.query_one(erased, &[]).await.expect("counted").get::<_, i64>(0), 2);
    owner.batch_execute("UPDATE postbox.outbox SET payload = '1'").await.expect_err("an event does not change");
}
