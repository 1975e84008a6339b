//! Builds sinks and sources for tests.

use std::sync::Arc;
use std::time::Duration;

use postbox_config::SinkContext;
use postbox_core::{Sink, Source};
use postbox_nats::{NatsSinkTable, NatsSourceTable};
use postbox_testkit::{receiving, sending};

/// Longest wait for acks in tests with a silent server.
pub(crate) const SHORT: Duration = Duration::from_secs(1);

/// Settings of a server where clients without credentials may do everything, and others less:
/// `limited` may not look at messages, `blind` not at streams, `deaf` may not request messages,
/// `mute` not acknowledge them, and no answer reaches `unanswered`.
pub(crate) const LIMITED: &str = r#"
no_auth_user: all
authorization { users: [
    { user: all, password: a }
    { user: limited, password: b, permissions: { publish: { deny: ["in.forbidden", "$JS.API.STREAM.MSG.GET.>"] } } }
    { user: blind, password: c, permissions: { publish: { deny: ["$JS.API.STREAM.NAMES", "$JS.API.STREAM.INFO.>"] } } }
    { user: deaf, password: d, permissions: { publish: { deny: ["$JS.API.CONSUMER.MSG.NEXT.>"] } } }
    { user: mute, password: d, permissions: { publish: { deny: ["$JS.ACK.>"] } } }
    { user: unanswered, password: e, permissions: { subscribe: { deny: ["_INBOX.>"] } } }
] }
"#;
/// The credentials of `limited`.
pub(crate) const AS_LIMITED: &str = "auth = { user = \"limited\", password = \"b\" }";
/// The credentials of `blind`.
pub(crate) const AS_BLIND: &str = "auth = { user = \"blind\", password = \"c\" }";

/// Builds a sink from the address and these keys.
pub(crate) async fn sink(url: &str, keys: &str) -> Arc<dyn Sink> {
    sink_with(url, keys, &sending::context(sending::PATIENCE / 2)).await
}

pub(crate) async fn sink_with(url: &str, keys: &str, context: &SinkContext) -> Arc<dyn Sink> {
    sending::sink::<NatsSinkTable>(&beside(url, keys), context).await
}

/// Builds a source from the address and these keys.
pub(crate) async fn source(url: &str, keys: &str) -> Arc<dyn Source> {
    receiving::source::<NatsSourceTable>(&beside(url, keys)).await
}

pub(crate) fn table(url: &str, keys: &str) -> NatsSourceTable {
    sending::table(&beside(url, keys))
}

fn beside(url: &str, keys: &str) -> String {
    format!("url = {url:?}\n{keys}")
}
