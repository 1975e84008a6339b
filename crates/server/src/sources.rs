//! Webhooks in: the configured sources on the ingress, and what became of their messages.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use postbox_config::{Adapter, Kind, Table, adapter, entries, from_core};
use postbox_core::{Clock, LogName, Result, SourceName, Store};
use postbox_ingress::{Count, Ingress, WebhookSource, WebhookTable};

use crate::sinks::BROKERS_PLANNED;

/// Every kind of source. A new one is one row here.
const SOURCES: &[Adapter<dyn SourceTable>] = &[Adapter::new::<WebhookTable>(
    "webhook",
    r#"{ type = "webhook", scheme = "standard-webhooks", secret = "env:PARTNER_SECRET" }"#,
    |keys| Arc::new(WebhookTable::read(keys)),
)];

/// The keys of a source, and the source built from them.
trait SourceTable: fmt::Debug + Send + Sync {
    fn log(&self) -> &LogName;
    /// How long the sender goes on sending a message that was not answered (`retry_horizon`).
    fn repeats_for(&self) -> Duration;
    /// How long a message that was captured could be sent again (`tolerance`), where it is written.
    fn fresh_for(&self) -> Option<Duration>;
    fn build(&self, name: SourceName) -> Result<WebhookSource>;
}

impl SourceTable for WebhookTable {
    fn log(&self) -> &LogName {
        &self.log
    }

    fn repeats_for(&self) -> Duration {
        self.repeats_for()
    }

    /// Signed as far ahead as is allowed, a message is young for twice the tolerance.
    fn fresh_for(&self) -> Option<Duration> {
        self.tolerance.map(|tolerance| tolerance.saturating_mul(2))
    }

    fn build(&self, name: SourceName) -> Result<WebhookSource> {
        self.source(name)
    }
}

/// `[sources.NAME]`: where messages come from.
#[derive(Debug, Clone)]
pub struct SourceConfig {
    /// Its name, and its path: `POST /in/NAME`.
    pub name: SourceName,
    /// The log it stores into.
    pub log: LogName,
    table: Arc<dyn SourceTable>,
}

/// All of them, by their names.
pub(crate) fn sources() -> Kind<Vec<SourceConfig>> {
    let source = adapter("source", SOURCES, BROKERS_PLANNED);
    entries(from_core, source).map(|sources| {
        let source = |(name, (_, table)): (SourceName, (_, Arc<dyn SourceTable>))| SourceConfig {
            name,
            log: table.log().clone(),
            table,
        };
        sources.into_iter().map(source).collect()
    })
}

impl SourceConfig {
    /// How long its sender goes on sending a message that was not answered.
    pub(crate) fn repeats_for(&self) -> Duration {
        self.table.repeats_for()
    }

    /// How long a captured message could be sent again, where that is written.
    pub(crate) fn fresh_for(&self) -> Option<Duration> {
        self.table.fresh_for()
    }
}

/// Every configured source, ready to be served.
pub(crate) struct Sources {
    ingress: Arc<Ingress>,
    /// Which log each stores into.
    logs: Vec<(SourceName, LogName)>,
}

impl Sources {
    pub(crate) fn build(configs: &[SourceConfig], store: &Arc<dyn Store>, clock: &Arc<dyn Clock>) -> Result<Self> {
        let sources =
            configs.iter().map(|config| config.table.build(config.name.clone())).collect::<Result<Vec<_>>>()?;
        let logs = configs.iter().map(|config| (config.name.clone(), config.log.clone())).collect();
        Ok(Self { ingress: Ingress::new(sources, Arc::clone(store) as _, Arc::clone(clock))?, logs })
    }

    /// `POST /in/{source}`.
    pub(crate) fn router(&self) -> Router {
        postbox_ingress::router(Arc::clone(&self.ingress))
    }

    /// The sources that store into a log.
    pub(crate) fn of_log(&self, log: &LogName) -> impl Iterator<Item = &SourceName> {
        self.logs.iter().filter(move |(_, its)| its == log).map(|(source, _)| source)
    }

    /// How many headers of each source's messages an event had no room for.
    pub(crate) fn headers_dropped(&self) -> Vec<(SourceName, u64)> {
        self.ingress.headers_dropped()
    }

    /// How often each source gave each answer.
    pub(crate) fn counts(&self) -> Vec<Count> {
        self.ingress.counts()
    }
}
