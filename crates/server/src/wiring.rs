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
    let context = sink_context(&config.settings, listening, clock);
    if let Some(sink) = config.sink.build(&context).await? {
        builder = builder.sink(sink);
    }
    if let Some(dead_to) = &config.dead_to
        && let Some(sink) = dead_to.build(&context).await?
    {
        builder = builder.dead_to(sink, Arc::clone(store) as _);
    }
    builder.build()
}

/// What the sinks of a subscription are built with.
pub(crate) fn sink_context(settings: &RelaySettings, listening: SocketAddr, clock: &Arc<dyn Clock>) -> SinkContext {
    let RelaySettings { retry, breaker, lease_ttl, deliver_timeout, concurrency, .. } = settings;
    let retry_max = retry.delays.iter().copied().max().unwrap_or(retry.delay_max);
    SinkContext {
        clock: Arc::clone(clock),
        listening: vec![listening],
        deliver_timeout: *deliver_timeout,
        repeats_within: *deliver_timeout + retry_max.max(*lease_ttl).max(breaker.max),
        concurrency: *concurrency,
    }
}
