//! Webhooks in: the configured sources on the ingress, and what became of their messages.

use std::sync::Arc;

use axum::Router;
use postbox_core::{Clock, Error, LogName, Result, SourceName, Store};
use postbox_ingress::{Count, Ingress, Origin, WebhookSource};

use crate::config::SourceConfig;
use crate::wiring::{sns_verifier, verifier};

/// Every configured source, ready to be served.
pub(crate) struct Sources {
    ingress: Arc<Ingress>,
    /// Which log each stores into.
    logs: Vec<(SourceName, LogName)>,
}

impl Sources {
    pub(crate) fn build(configs: &[SourceConfig], store: &Arc<dyn Store>, clock: &Arc<dyn Clock>) -> Result<Self> {
        let sources = configs.iter().map(source).collect::<Result<Vec<_>>>()?;
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

fn source(config: &SourceConfig) -> Result<WebhookSource> {
    let invalid = |text| Error::invalid("configure", "secret_invalid", format!("source {}: {text}", config.name));
    let (name, log) = (config.name.clone(), config.log.clone());
    let mut source = match &config.sns {
        Some(sns) => {
            let verifier = sns_verifier(sns, &config.settings).map_err(invalid)?;
            WebhookSource::sns(name, log, verifier, sns.confirm)?
        }
        None => {
            WebhookSource::new(name, log, verifier(config.scheme, &config.secrets, &config.settings).map_err(invalid)?)
        }
    };
    source.limits = config.limits;
    source.allowed_origins.clone_from(&config.allowed_origins);
    let overrule = |place: &mut Vec<Origin>, origin: &Option<Origin>| {
        if let Some(origin) = origin {
            *place = vec![origin.clone()];
        }
    };
    overrule(&mut source.mapping.id, &config.mapping.id);
    overrule(&mut source.mapping.topic, &config.mapping.topic);
    overrule(&mut source.mapping.key, &config.mapping.key);
    overrule(&mut source.mapping.tenant, &config.mapping.tenant);
    Ok(source)
}
