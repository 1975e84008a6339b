//! Builds sinks and sources for tests.

use std::sync::Arc;
use std::time::Duration;

use postbox_config::SinkContext;
use postbox_core::Sink;
use postbox_rabbitmq::{RabbitmqSinkTable, RabbitmqSourceTable};
use postbox_testkit::sending;

/// Longest wait for confirms in tests with a silent server.
pub(crate) const SHORT: Duration = Duration::from_secs(1);

/// Limits of a server that several tests share: it ends a consumer that keeps a message for two
/// seconds, lets frames be larger than ours, and takes only small messages.
pub(crate) const LIMITS: &str = "consumer_timeout = 2000\nframe_max = 1048576\nmax_message_size = 100000\n";

/// Builds a sink from the address and these keys.
pub(crate) async fn sink(url: &str, keys: &str) -> Arc<dyn Sink> {
    sink_with(url, keys, &sending::context(sending::PATIENCE / 2)).await
}

pub(crate) async fn sink_with(url: &str, keys: &str, context: &SinkContext) -> Arc<dyn Sink> {
    sending::sink::<RabbitmqSinkTable>(&format!("url = {url:?}\n{keys}"), context).await
}

pub(crate) fn table(url: &str, keys: &str) -> RabbitmqSourceTable {
    sending::table(&format!("url = {url:?}\n{keys}"))
}
