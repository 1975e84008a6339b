//! From configuration to running parts.

use std::net::SocketAddr;
use std::sync::Arc;

use postbox_config::SinkContext;
use postbox_core::{Clock, Result, Store};
use postbox_engine::{Relay, RelaySettings};

use crate::config::SubscriptionConfig;

/// The relay of a subscription, with its sink. Touches no store. `listening` is where the service
/// listens: guarded sinks do not call that.
pub async fn relay(
    store: &Arc<dyn Store>,
    config: &SubscriptionConfig,
    listening: SocketAddr,
    clock: &Arc<dyn Clock>,
) -> Result<Relay> {
    let mut builder = Relay::builder(Arc::clone(store) as _, config.subscription.clone())
        .admin(Arc::clone(store) as _)
        .settings(config.settings.clone())
        .clock(Arc::clone(clock));
    let RelaySettings { retry, breaker, lease_ttl, deliver_timeout, .. } = &config.settings;
    let retry_max = retry.delays.iter().copied().max().unwrap_or(retry.delay_max);
    let context = SinkContext {
        clock: Arc::clone(clock),
        repeats_within: *deliver_timeout + retry_max.max(*lease_ttl).max(breaker.max),
        listening: vec![listening],
        deliver_timeout: *deliver_timeout,
        concurrency: config.settings.concurrency,
    };
    if let Some(sink) = config.sink.build(&context).await? {
        builder = builder.sink(sink);
    }
    builder.build()
}
