//! `diesel-async`.

use ::diesel_async::{AnsiTransactionManager, AsyncConnection as _, AsyncPgConnection, TransactionManager as _};
use async_trait::async_trait;
use postbox::postgres::Postgres;
use postbox::{Appended, Error, NewEvent, Postbox, Result};

use crate::{End, Typed};

pub(crate) struct Driver;

#[async_trait]
impl crate::Driver for Driver {
    async fn append(url: &str, postbox: &Postbox<Postgres>, lists: Vec<Vec<Typed>>, end: End) -> Vec<Result<Appended>> {
        let mut connection = AsyncPgConnection::establish(url).await.expect("connected");
        AnsiTransactionManager::begin_transaction(&mut connection).await.expect("begun");
        let mut given = Vec::new();
        for list in lists {
            given.push(postbox.append(&mut connection, list).await);
        }
        match end {
            End::Commit => AnsiTransactionManager::commit_transaction(&mut connection).await.expect("committed"),
            End::RollBack => {
                AnsiTransactionManager::rollback_transaction(&mut connection).await.expect("rolled back");
            }
        }
        given
    }

    async fn append_outside(url: &str, postbox: &Postbox<Postgres>) -> Option<Error> {
        let mut connection = AsyncPgConnection::establish(url).await.expect("connected");
        postbox.append(&mut connection, NewEvent::json("t", "{}")).await.err()
    }
}
