//! Builds the running parts from the configuration.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use futures::future::join_all;
use postbox_config::SinkContext;
use postbox_core::{
    Capabilities, Clock, Delivery, Error, HighWaterMarks, Log, Outcome, Result, Sink, Store, SubscriptionName,
};
use postbox_engine::{Relay, RelaySettings, SharedRate, SystemRandom, fresh_owner};

use crate::config::{ServerConfig, SubscriptionConfig};

/// The sinks: one per subscription, shared by all stores that have it. So a destination sees one
/// client per program, not one per store.
pub struct Sinks {
    by_subscription: HashMap<SubscriptionName, Destination>,
    /// Sinks that several relays share. They are closed after the last of these relays.
    shared: Vec<Arc<dyn Sink>>,
}

/// The sinks of a subscription, for its events and for its dead ones, and the rate that its relays
/// share, with those of other stores and of subscriptions with `rate_of`.
#[derive(Clone, Default)]
struct Destination {
    sink: Option<Arc<dyn Sink>>,
    dead_to: Option<Arc<dyn Sink>>,
    rate: Option<Arc<SharedRate>>,
}

impl Sinks {
    /// Builds the sinks for this number of stores, without connecting. `listening` is the address
    /// of the service itself, which guarded sinks must not call.
    pub async fn build(
        subscriptions: impl IntoIterator<Item = &SubscriptionConfig>,
        stores: usize,
        listening: SocketAddr,
        clock: &Arc<dyn Clock>,
    ) -> Result<Self> {
        let mut sinks = Self { by_subscription: HashMap::new(), shared: Vec::new() };
        let mut rates: HashMap<SubscriptionName, Arc<SharedRate>> = HashMap::new();
        for of in subscriptions {
            let context = sink_context(&of.settings, listening, clock);
            let sink = of.sink.build(&context).await.map_err(|error| with_name(of, "sink", error))?;
            let dead_to = match &of.dead_to {
                Some(dead_to) => dead_to.build(&context).await.map_err(|error| with_name(of, "dead_to", error))?,
                None => None,
            };
            let rate = of.settings.rate.map(|rate| {
                let named = of.rate_of.as_ref().unwrap_or(&of.subscription.name);
                Arc::clone(rates.entry(named.clone()).or_insert_with(|| Arc::new(SharedRate::new(rate))))
            });
            let mut destination = Destination { sink, dead_to, rate };
            if stores > 1 {
                for sink in [&mut destination.sink, &mut destination.dead_to].into_iter().flatten() {
                    sinks.shared.push(Arc::clone(sink));
                    *sink = Arc::new(Shared(Arc::clone(sink)));
                }
            }
            sinks.by_subscription.insert(of.subscription.name.clone(), destination);
        }
        Ok(sinks)
    }

    /// Closes the shared sinks. No relay may do it, because another could still use them.
    pub(crate) async fn close(&self) {
        join_all(self.shared.iter().map(|sink| sink.close())).await;
    }
}

/// Names the key of a sink that cannot be built, because a file has many sinks.
fn with_name(of: &SubscriptionConfig, key: &str, error: Error) -> Error {
    let text = format!("subscriptions.{}.{key}: {}", of.subscription.name, error.message());
    Error::new(error.kind(), error.operation(), error.code().to_owned(), text).with_source(error)
}

/// A sink shared by the relays of several stores. The first relay to end must not close it.
struct Shared(Arc<dyn Sink>);

#[async_trait]
impl Sink for Shared {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        self.0.deliver(deliveries).await
    }

    fn high_water_marks(&self) -> Option<&dyn HighWaterMarks> {
        self.0.high_water_marks()
    }
}

/// Builds the relay of a subscription on a store, with its sink. Touches no store. `log` is the
/// store's, as [`LaneLeases`](crate::LaneLeases) give it. Its name begins with that of the replica.
pub fn relay(
    store: &Arc<dyn Store>,
    log: Arc<dyn Log>,
    (server, config): (&ServerConfig, &SubscriptionConfig),
    sinks: &Sinks,
    clock: &Arc<dyn Clock>,
) -> Result<Relay> {
    let mut builder = Relay::builder(log, config.subscription.clone())
        .admin(Arc::clone(store) as _)
        .settings(config.settings.clone())
        .clock(Arc::clone(clock))
        .owner(fresh_owner(&server.replica(), &SystemRandom)?);
    let Destination { sink, dead_to, rate } =
        sinks.by_subscription.get(&config.subscription.name).cloned().unwrap_or_default();
    if let Some(sink) = sink {
        builder = builder.sink(sink);
    }
    if let Some(dead_to) = dead_to {
        builder = builder.dead_to(dead_to, Arc::clone(store) as _);
    }
    if let Some(rate) = rate {
        builder = builder.shared_rate(rate);
    }
    builder.build()
}

/// The context for building a subscription's sinks.
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use postbox_engine::TokioClock;

    use super::*;
    use crate::config::Config;

    #[derive(Default)]
    struct Counting(AtomicUsize);

    #[async_trait]
    impl Sink for Counting {
        async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
            vec![Outcome::DELIVERED; deliveries.len()]
        }

        async fn close(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn a_rate_is_that_of_its_subscription_and_of_those_that_name_it() {
        let text =
            "[subscriptions.a]\nrate = \"5/s\"\n[subscriptions.b]\nrate_of = \"a\"\n[subscriptions.c]\nrate = \"5/s\"";
        let config = Config::parse(text).expect("no faults");
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
        let sinks = Sinks::build(&config.subscriptions, 2, config.server.listen, &clock).await.expect("built");
        let rate = |name: &str| sinks.by_subscription[&SubscriptionName::new(name).expect("a name")].rate.as_ref();
        let [a, b, c] = ["a", "b", "c"].map(|name| rate(name).expect("a rate"));
        assert!(Arc::ptr_eq(a, b) && !Arc::ptr_eq(a, c));
    }

    #[tokio::test]
    async fn a_sink_of_several_stores_is_closed_after_the_last_of_them() {
        let sink = Arc::<Counting>::default();
        let sinks = Sinks { by_subscription: HashMap::new(), shared: vec![sink.clone()] };
        Shared(sink.clone()).close().await;
        assert_eq!(sink.0.load(Ordering::Relaxed), 0, "a relay that ends closes nothing");
        sinks.close().await;
        assert_eq!(sink.0.load(Ordering::Relaxed), 1);
    }
}
