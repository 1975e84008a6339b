//! `sqlx` 0.8: half of the appends through the transaction, half through a lent connection.

use ::sqlx08::{Connection as _, PgConnection};
use async_trait::async_trait;
use postbox::postgres::Postgres;
use postbox::{Appended, Error, NewEvent, Postbox, Result};

use crate::{End, Typed};

pub(crate) struct Driver;

#[async_trait]
impl crate::Driver for Driver {
    async fn append(url: &str, postbox: &Postbox<Postgres>, lists: Vec<Vec<Typed>>, end: End) -> Vec<Result<Appended>> {
        let mut connection = PgConnection::connect(url).await.expect("connected");
        let mut tx = connection.begin().await.expect("begun");
        let mut given = Vec::new();
        for (n, list) in lists.into_iter().enumerate() {
            given.push(match n % 2 {
                0 => postbox.append(&mut tx, list).await,
                _ => lent(&mut tx, postbox, list).await,
            });
        }
        match end {
            End::Commit => tx.commit().await.expect("committed"),
            End::RollBack => tx.rollback().await.expect("rolled back"),
        }
        given
    }

    async fn append_outside(url: &str, postbox: &Postbox<Postgres>) -> Option<Error> {
        let mut connection = PgConnection::connect(url).await.expect("connected");
        postbox.append(&mut connection, NewEvent::json("t", "{}")).await.err()
    }
}

async fn lent(tx: &mut PgConnection, postbox: &Postbox<Postgres>, list: Vec<Typed>) -> Result<Appended> {
    postbox.append(tx, list).await
}

#[tokio::test]
async fn a_statement_stays_prepared_only_where_that_is_asked_for() {
    let fixture = crate::fixture().await;
    let count = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%outbox\\_append%'";
    for (prepared, kept) in [(false, 0), (true, 2)] {
        let postbox = Postbox::new(Postgres { prepared, ..Postgres::default() });
        let mut connection = PgConnection::connect(&fixture.url).await.expect("connected");
        let mut tx = connection.begin().await.expect("begun");
        for events in [1, 1, 2, 2] {
            postbox.append(&mut tx, vec![NewEvent::json("t", "{}"); events]).await.expect("appended");
        }
        let counted: i64 = ::sqlx08::query_scalar(count).fetch_one(&mut *tx).await.expect("counted");
        tx.commit().await.expect("committed");
        assert_eq!(counted, kept, "prepared: {prepared}");
    }
    assert_eq!(fixture.events().await, 12);
}
