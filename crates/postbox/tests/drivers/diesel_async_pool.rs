//! `diesel-async`, on a connection of its pool.

use ::diesel_async::pooled_connection::AsyncDieselConnectionManager;
use ::diesel_async::pooled_connection::deadpool::{Object, Pool};
use ::diesel_async::{AsyncConnection, AsyncPgConnection, TransactionManager as _};
use async_trait::async_trait;
use postbox::postgres::Postgres;
use postbox::{Appended, Error, NewEvent, Postbox, Result};

use crate::{End, Typed};

type Pooled = Object<AsyncPgConnection>;
type Transactions = <Pooled as AsyncConnection>::TransactionManager;

pub(crate) struct Driver;

async fn connection(url: &str) -> Pooled {
    let pool = Pool::<AsyncPgConnection>::builder(AsyncDieselConnectionManager::new(url)).build().expect("a pool");
    pool.get().await.expect("connected")
}

#[async_trait]
impl crate::Driver for Driver {
    async fn append(url: &str, postbox: &Postbox<Postgres>, lists: Vec<Vec<Typed>>, end: End) -> Vec<Result<Appended>> {
        let mut connection = connection(url).await;
        Transactions::begin_transaction(&mut connection).await.expect("begun");
        let mut given = Vec::new();
        for list in lists {
            given.push(postbox.append(&mut connection, list).await);
        }
        match end {
            End::Commit => Transactions::commit_transaction(&mut connection).await.expect("committed"),
            End::RollBack => Transactions::rollback_transaction(&mut connection).await.expect("rolled back"),
        }
        given
    }

    async fn append_outside(url: &str, postbox: &Postbox<Postgres>) -> Option<Error> {
        postbox.append(&mut connection(url).await, NewEvent::json("t", "{}")).await.err()
    }
}
