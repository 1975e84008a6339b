//! `diesel` on libpq, which blocks.

use ::diesel::connection::{AnsiTransactionManager, TransactionManager as _};
use ::diesel::{Connection as _, PgConnection};
use async_trait::async_trait;
use postbox::postgres::Postgres;
use postbox::{Appended, Error, NewEvent, Postbox, Result};

use crate::{End, Typed};

pub(crate) struct Driver;

#[async_trait]
impl crate::Driver for Driver {
    async fn append(url: &str, postbox: &Postbox<Postgres>, lists: Vec<Vec<Typed>>, end: End) -> Vec<Result<Appended>> {
        let mut connection = PgConnection::establish(url).expect("connected");
        AnsiTransactionManager::begin_transaction(&mut connection).expect("begun");
        let given = lists.into_iter().map(|list| postbox.append(&mut connection, list)).collect();
        match end {
            End::Commit => AnsiTransactionManager::commit_transaction(&mut connection).expect("committed"),
            End::RollBack => AnsiTransactionManager::rollback_transaction(&mut connection).expect("rolled back"),
        }
        given
    }

    async fn append_outside(url: &str, postbox: &Postbox<Postgres>) -> Option<Error> {
        let mut connection = PgConnection::establish(url).expect("connected");
        postbox.append(&mut connection, NewEvent::json("t", "{}")).err()
    }
}
