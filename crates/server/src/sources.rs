//! Where messages come from: webhooks on the ingress, and broker queues that are pulled from.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use postbox_config::{
    Adapter, Key, Kind, Section, SourceConfig, SourceContext, Table, adapter, entries, from_core, table,
};
use postbox_core::{Clock, LogName, RawMessage, Receive, Result, SourceName, StoreName};
use postbox_ingress::{Count, Ingress, SnsClient, WebhookTable};
use postbox_receiver::{Receiver, ReceiverSettings, Storm};

use crate::config::store_names;
use crate::fault::Fault;
use crate::supervised_receiver::SupervisedReceiver;

/// Every type of source. A new one is one row here.
pub(crate) const SOURCES: &[Adapter<SourceTable>] = &[
    Adapter::new::<Placed<WebhookTable>>(
        "webhook",
        r#"{ type = "webhook", scheme = "standard-webhooks", secret = "env:PARTNER_SECRET" }"#,
        |keys| read(keys, |table: WebhookTable| SourceKind::Webhook(Box::new(table))),
    ),
    #[cfg(feature = "kafka")]
    Adapter::new::<Placed<postbox_kafka::KafkaSourceTable>>(
        "kafka",
        r#"{ type = "kafka", brokers = "127.0.0.1:9092", topic = "orders" }"#,
        |keys| read(keys, pulled::<postbox_kafka::KafkaSourceTable>),
    ),
    #[cfg(feature = "mqtt")]
    Adapter::new::<Placed<postbox_mqtt::MqttSourceTable>>(
        "mqtt",
        r##"{ type = "mqtt", url = "mqtt://127.0.0.1:1883", client_id = "orders-1", topic = "orders/#" }"##,
        |keys| read(keys, pulled::<postbox_mqtt::MqttSourceTable>),
    ),
    #[cfg(feature = "nats")]
    Adapter::new::<Placed<postbox_nats::NatsSourceTable>>(
        "nats",
        r#"{ type = "nats", url = "nats://127.0.0.1:4222", stream = "ORDERS" }"#,
        |keys| read(keys, pulled::<postbox_nats::NatsSourceTable>),
    ),
    #[cfg(feature = "rabbitmq")]
    Adapter::new::<Placed<postbox_rabbitmq::RabbitmqSourceTable>>(
        "rabbitmq",
        r#"{ type = "rabbitmq", url = "amqp://127.0.0.1:5672", queue = "orders" }"#,
        |keys| read(keys, pulled::<postbox_rabbitmq::RabbitmqSourceTable>),
    ),
    #[cfg(feature = "redis")]
    Adapter::new::<Placed<postbox_redis::RedisSourceConfig>>(
        "redis",
        r#"{ type = "redis", url = "redis://127.0.0.1:6379", stream = "orders" }"#,
        |keys| read(keys, pulled::<postbox_redis::RedisSourceConfig>),
    ),
    #[cfg(feature = "sqs")]
    Adapter::new::<Placed<postbox_sqs::SqsSourceTable>>(
        "sqs",
        r#"{ type = "sqs", queue_url = "https://sqs.eu-west-1.amazonaws.com/123456789012/orders" }"#,
        |keys| read(keys, pulled::<postbox_sqs::SqsSourceTable>),
    ),
];

/// Sources that may be compiled out.
const OPTIONAL: &[&str] = &["kafka", "mqtt", "nats", "rabbitmq", "redis", "sqs"];

/// The keys of a source.
#[derive(Debug)]
pub(crate) struct SourceTable {
    stores: Vec<StoreName>,
    kind: SourceKind,
}

#[derive(Debug)]
enum SourceKind {
    /// Senders post to the ingress.
    Webhook(Box<WebhookTable>),
    /// A receiver pulls from a broker.
    Pulled(Arc<dyn SourceConfig>),
}

table! {
    /// The keys of every source.
    struct PlaceTable {
        /// The stores that have it, where there are several; a broker's source has one.
        ///
        /// [Many stores](many-stores.md).
        stores: Vec<StoreName> = store_names(), unset("all", r#"["acme"]"#);
    }
}

/// The keys of one type of source, and those that every source has.
struct Placed<T> {
    place: PlaceTable,
    table: T,
}

impl<T: Table> Table for Placed<T> {
    fn doc() -> String {
        T::doc()
    }

    fn keys() -> Vec<Key> {
        T::keys().into_iter().chain(PlaceTable::keys()).collect()
    }

    fn read(section: &Section<'_>) -> Self {
        Self { place: PlaceTable::read(section), table: T::read(section) }
    }
}

fn read<T: Table>(section: &Section<'_>, kind: fn(T) -> SourceKind) -> Arc<SourceTable> {
    let Placed { place, table } = Placed::<T>::read(section);
    Arc::new(SourceTable { stores: place.stores, kind: kind(table) })
}

fn pulled<T: SourceConfig>(table: T) -> SourceKind {
    SourceKind::Pulled(Arc::new(table))
}

/// `[sources.NAME]`: where messages come from.
#[derive(Debug, Clone)]
pub struct NamedSource {
    /// Its name; a webhook's path is `POST /in/NAME`.
    pub name: SourceName,
    /// The log it stores into.
    pub log: LogName,
    /// The stores that have it, where there are several; empty: all of them.
    pub stores: Vec<StoreName>,
    /// The store that this copy of the source writes to, where there are several.
    pub(crate) of_store: Option<StoreName>,
    type_name: &'static str,
    table: Arc<SourceTable>,
}

/// The prefix of webhook paths. With several stores, each has its own.
fn below(store: Option<&StoreName>) -> String {
    store.map_or_else(|| "/in".to_owned(), |store| format!("/in/{store}"))
}

/// All sources, by name.
pub(crate) fn sources() -> Kind<Vec<NamedSource>> {
    let source = adapter("source", SOURCES, OPTIONAL);
    let sources = entries(from_core, source).map(|sources| {
        let source = |(name, (type_name, table)): (SourceName, (_, Arc<SourceTable>))| NamedSource {
            name,
            log: match &table.kind {
                SourceKind::Webhook(table) => table.log.clone(),
                SourceKind::Pulled(table) => table.log().clone(),
            },
            stores: table.stores.clone(),
            of_store: None,
            type_name,
            table,
        };
        sources.into_iter().map(source).collect()
    });
    sources.check(|sources: &Vec<NamedSource>| {
        let lost = |source: &&NamedSource| !source.is_pulled() && matches!(source.name.as_str(), "." | "..");
        let Some(NamedSource { name, .. }) = sources.iter().find(lost) else { return Ok(()) };
        Err(format!(
            "a webhook cannot be named {name}, because senders shorten the path /in/{name}; give it another name"
        ))
    })
}

impl NamedSource {
    /// A source of your own, added to those in the file.
    pub fn pulled(name: SourceName, type_name: &'static str, config: Arc<dyn SourceConfig>) -> Self {
        let log = config.log().clone();
        let table = Arc::new(SourceTable { stores: Vec::new(), kind: SourceKind::Pulled(config) });
        Self { name, log, stores: Vec::new(), of_store: None, type_name, table }
    }

    /// The value of `type`.
    pub fn type_name(&self) -> &'static str {
        self.type_name
    }

    /// Tries to reach the source and describes the result. Takes no message and creates nothing.
    pub(crate) async fn connect(&self, clock: &Arc<dyn Clock>) -> Result<String> {
        match &self.table.kind {
            SourceKind::Webhook(table) => {
                table.source(self.name.clone(), &SnsClient::default())?;
                Ok(format!("waits for senders at POST {}/{}", below(self.of_store.as_ref()), self.name))
            }
            SourceKind::Pulled(table) => {
                table.connect(&SourceContext { name: self.name.clone(), clock: Arc::clone(clock) }).await
            }
        }
    }

    /// The path that senders post to; `None` for a pulled source.
    pub fn path(&self) -> Option<String> {
        (!self.is_pulled()).then(|| format!("{}/{}", below(self.of_store.as_ref()), self.name))
    }

    /// Whether messages are pulled from a broker.
    pub(crate) fn is_pulled(&self) -> bool {
        matches!(&self.table.kind, SourceKind::Pulled(_))
    }

    /// How long the sender repeats a message that got no answer (`retry_horizon`). Zero for a
    /// broker: its messages are acknowledged once they are stored.
    pub(crate) fn repeats_for(&self) -> Duration {
        match &self.table.kind {
            SourceKind::Webhook(table) => table.repeats_for(),
            SourceKind::Pulled(_) => Duration::ZERO,
        }
    }

    /// How long a captured message could be replayed, if `tolerance` is configured: signed as far
    /// ahead as allowed, a message is fresh for twice the tolerance.
    pub(crate) fn fresh_for(&self) -> Option<Duration> {
        match &self.table.kind {
            SourceKind::Webhook(table) => table.tolerance.map(|tolerance| tolerance.saturating_mul(2)),
            SourceKind::Pulled(_) => None,
        }
    }
}

/// All configured sources of a store, built.
pub(crate) struct Sources {
    ingress: Arc<Ingress>,
    receivers: Vec<Arc<SupervisedReceiver>>,
    /// The log that each source writes to.
    logs: Vec<(SourceName, LogName)>,
    /// The path prefix of its webhooks.
    path: String,
}

impl Sources {
    /// `connections` is how many requests of all webhooks together may wait for the store,
    /// `drain_timeout` how long a stop waits for messages that are being stored. All stores share
    /// `sns`.
    pub(crate) async fn build(
        configs: &[NamedSource],
        of_store: Option<&StoreName>,
        (connections, drain_timeout): (usize, Duration),
        sns: &SnsClient,
        receive: &Arc<dyn Receive>,
        clock: &Arc<dyn Clock>,
    ) -> Result<Self> {
        let (mut webhooks, mut receivers) = (Vec::new(), Vec::new());
        for NamedSource { name, log, table, .. } in configs {
            match &table.kind {
                SourceKind::Webhook(table) => webhooks.push(table.source(name.clone(), sns)?),
                SourceKind::Pulled(table) => {
                    let context = SourceContext { name: name.clone(), clock: Arc::clone(clock) };
                    let source = table.build(&context).await?;
                    // The source's own configuration bounds how many messages it hands out
                    // unsettled.
                    let in_flight_max = source.capabilities().in_flight_max.max(1);
                    let receiver = Receiver::builder(Arc::clone(receive), name.clone(), log.clone(), Arc::clone(clock))
                        .settings(ReceiverSettings { drain_timeout, in_flight_max, ..ReceiverSettings::default() })
                        .pull(source)
                        .decode({
                            let (table, name) = (Arc::clone(table), name.clone());
                            move |message: &RawMessage| table.decode(&name, message)
                        })
                        .build()?;
                    receivers.push(SupervisedReceiver::new(name.clone(), receiver, Arc::clone(table)));
                }
            }
        }
        let logs = configs.iter().map(|config| (config.name.clone(), config.log.clone())).collect();
        let ingress = Ingress::bounded(webhooks, Arc::clone(receive), Arc::clone(clock), connections.max(1))?;
        Ok(Self { ingress, receivers, logs, path: below(of_store) })
    }

    /// `POST /in/{source}`, or `POST /in/{store}/{source}`.
    pub(crate) fn router(&self) -> Router {
        postbox_ingress::router_below(&self.path, Arc::clone(&self.ingress))
    }

    /// The receivers of the pulled sources.
    pub(crate) fn receivers(&self) -> &[Arc<SupervisedReceiver>] {
        &self.receivers
    }

    /// The sources that write to a log.
    pub(crate) fn of_log(&self, log: &LogName) -> impl Iterator<Item = &SourceName> {
        self.logs.iter().filter(move |(_, its)| its == log).map(|(source, _)| source)
    }

    /// Number of headers that did not fit into an event, by source.
    pub(crate) fn headers_dropped(&self) -> Vec<(SourceName, u64)> {
        self.ingress.headers_dropped()
    }

    /// The sources with a replay storm: most of their messages are repeats.
    pub(crate) fn storms(&self) -> Vec<(SourceName, Storm)> {
        let pulled = self.receivers.iter().filter_map(|it| Some((it.name.clone(), it.storm()?)));
        self.ingress.storms().into_iter().chain(pulled).collect()
    }

    /// What keeps the sources from receiving. That messages cannot be stored is left out if the
    /// store is down: that is the reason, and the caller knows it already.
    pub(crate) fn faults(&self, store_is_up: bool) -> Vec<Fault> {
        let unread = self.receivers.iter().filter_map(|receiver| receiver.fault());
        let pulled = self.receivers.iter().filter_map(|it| Some((it.name.clone(), it.store_outage()?)));
        let unstored = self.ingress.store_outages().into_iter().chain(pulled).filter(|_| store_is_up);
        unread.chain(unstored.map(Fault::of_storing)).collect()
    }

    /// What became of each source's messages: the answers given to webhook senders, and the
    /// receivers' counts.
    pub(crate) fn counts(&self) -> Vec<Count> {
        let mut counts = self.ingress.counts();
        counts.extend(self.receivers.iter().flat_map(|receiver| receiver.counts()));
        counts
    }
}
