//! `sea-orm`: half of the appends through a shared reference.

use ::sea_orm::{ConnectionTrait as _, Database, TransactionTrait as _};
use async_trait::async_trait;
use postbox::postgres::Postgres;
use postbox::{Appended, Error, NewEvent, Postbox, Result};

use crate::{End, Typed};

pub(crate) struct Driver;

#[async_trait]
impl crate::Driver for Driver {
    async fn append(url: &str, postbox: &Postbox<Postgres>, lists: Vec<Vec<Typed>>, end: End) -> Vec<Result<Appended>> {
        let database = Database::connect(url).await.expect("connected");
        let mut tx = database.begin().await.expect("begun");
        let mut given = Vec::new();
        for (n, list) in lists.into_iter().enumerate() {
            given.push(match n % 2 {
                0 => postbox.append(&mut tx, list).await,
                _ => postbox.append(&mut &tx, list).await,
            });
        }
        match end {
            End::Commit => tx.commit().await.expect("committed"),
            End::RollBack => tx.rollback().await.expect("rolled back"),
        }
        given
    }

    /// A nested begin fails, and `sqlx` below rolls the whole transaction back.
    async fn append_outside(url: &str, postbox: &Postbox<Postgres>) -> Option<Error> {
        let database = Database::connect(url).await.expect("connected");
        let mut tx = database.begin().await.expect("begun");
        tx.execute_unprepared("SELECT 1 / 0").await.expect_err("a division by zero");
        tx.begin().await.expect_err("the transaction is aborted");
        postbox.append(&mut tx, NewEvent::json("t", "{}")).await.err()
    }
}
