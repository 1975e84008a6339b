//! `tokio-postgres`: half of the appends through a shared reference.

use ::tokio_postgres::{Client, NoTls};
use async_trait::async_trait;
use postbox::postgres::Postgres;
use postbox::{Appended, Error, Postbox, Result};

use crate::{End, Typed};

pub(crate) struct Driver;

pub(crate) async fn client(url: &str) -> Client {
    let (client, connection) = ::tokio_postgres::connect(url, NoTls).await.expect("connected");
    tokio::spawn(connection);
    client
}

#[async_trait]
impl crate::Driver for Driver {
    async fn append(url: &str, postbox: &Postbox<Postgres>, lists: Vec<Vec<Typed>>, end: End) -> Vec<Result<Appended>> {
        let mut client = client(url).await;
        let mut tx = client.transaction().await.expect("begun");
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

    async fn append_outside(_: &str, _: &Postbox<Postgres>) -> Option<Error> {
        None
    }
}
