//! A server behind a proxy that can inject faults, and the contents of its streams.

use std::time::Duration;

use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::servers::{PrivateRedis, RedisKind};
use redis::aio::MultiplexedConnection;
use tokio::sync::Mutex;

/// Interval of the checks whether a condition holds.
pub(crate) const LOOK: Duration = Duration::from_millis(1);

/// The fields of an entry.
pub(crate) type Fields = Vec<(String, Vec<u8>)>;

/// A server, seen directly and through a proxy.
pub(crate) struct Broker {
    pub(crate) server: Mutex<PrivateRedis>,
    pub(crate) proxy: FaultProxy,
    direct: String,
}

impl Broker {
    pub(crate) async fn start(kind: RedisKind) -> Self {
        Self::of(PrivateRedis::launch(kind).await).await
    }

    pub(crate) async fn of(server: PrivateRedis) -> Self {
        let direct = server.url();
        let proxy = FaultProxy::in_front_of(&direct).await;
        Self { server: Mutex::new(server), proxy, direct }
    }

    pub(crate) fn url(&self) -> String {
        self.proxy.url(&self.direct)
    }

    /// Opens a connection that bypasses the proxy.
    pub(crate) async fn connection(&self) -> MultiplexedConnection {
        let client = redis::Client::open(self.direct.as_str()).expect("a URL");
        client.get_multiplexed_async_connection().await.expect("the server is there")
    }

    pub(crate) async fn ask<T: redis::FromRedisValue>(&self, command: &str) -> T {
        let mut words = command.split(' ');
        let mut command = redis::cmd(words.next().expect("a word"));
        words.for_each(|word| _ = command.arg(word));
        command.query_async(&mut self.connection().await).await.expect("an answer")
    }

    pub(crate) async fn entries(&self, stream: &str) -> Vec<Fields> {
        let entries: Vec<(String, Fields)> = self.ask(&format!("XRANGE {stream} - +")).await;
        entries.into_iter().map(|(_, fields)| fields).collect()
    }

    /// Waits until no connection goes through the proxy, and the client has noticed.
    pub(crate) async fn settle(&self, knows: impl Fn() -> bool) {
        while self.proxy.connections() > 0 || !knows() {
            tokio::time::sleep(LOOK).await;
        }
    }
}

pub(crate) fn field(fields: &[(String, Vec<u8>)], name: &str) -> Option<Vec<u8>> {
    fields.iter().find(|(its, _)| its == name).map(|(_, value)| value.clone())
}

pub(crate) fn text(fields: &[(String, Vec<u8>)], name: &str) -> Option<String> {
    field(fields, name).map(|value| String::from_utf8(value).expect("text"))
}
