//! `postbox check-config --connect`: whether the store, the destinations and the sources can be
//! reached. Nothing is written and no event is sent.

use std::sync::Arc;
use std::time::Duration;

use futures::stream::{StreamExt as _, iter};
use postbox_core::kit::{check_log, check_logs};
use postbox_core::{Clock, Error, ErrorKind, LogName, Result};
use postbox_engine::TokioClock;
use tokio::time::timeout;

use crate::config::Config;
use crate::status::is_unreachable;
use crate::stores::{check_rights, check_standby, open_store, validate_schema};
use crate::wiring;

/// Time limit of one check: a person waits for the answer.
const TRY_TIME_MAX: Duration = Duration::from_secs(30);

/// Most stores that are checked at once.
const STORES_AT_ONCE_MAX: usize = 32;

/// One part that was checked, and the result.
#[derive(Debug)]
pub struct Tried {
    /// Its name in the file, e.g. `subscriptions.orders-out.sink`.
    pub name: String,
    /// What was found, or what is wrong and how to fix it.
    pub found: Result<String>,
}

/// Checks every part that `config` names: the stores concurrently, the rest one after the other.
pub async fn connect(config: &Config) -> Vec<Tried> {
    let stores = config.per_store().into_iter().map(async |(name, share)| {
        let name = name.map_or_else(|| "store".to_owned(), |name| format!("stores.{name}"));
        one(&name, store(&share)).await
    });
    let mut tried: Vec<Tried> = iter(stores).buffered(STORES_AT_ONCE_MAX).collect().await;
    if !config.lease.is_store_alone() {
        tried.push(one("lease", config.lease.connect()).await);
    }
    let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
    for subscription in &config.subscriptions {
        let context = wiring::sink_context(&subscription.settings, config.server.listen, &clock);
        let sinks = [("sink", Some(&subscription.sink)), ("dead_to", subscription.dead_to.as_ref())];
        for (key, sink) in sinks.into_iter().filter_map(|(key, sink)| Some((key, sink?))) {
            let name = format!("subscriptions.{}.{key}", subscription.subscription.name);
            tried.push(one(&name, sink.connect(&context)).await);
        }
    }
    // A webhook has a path for each store.
    for (_, share) in config.per_store() {
        for source in &share.sources {
            tried.push(one(&format!("sources.{}", source.name), source.connect(&clock)).await);
        }
    }
    tried
}

async fn one(name: &str, trying: impl Future<Output = Result<String>>) -> Tried {
    let found = timeout(TRY_TIME_MAX, trying).await.unwrap_or_else(|_| {
        let text = format!("no answer within {TRY_TIME_MAX:?}; look for a firewall in between, or correct the address");
        Err(Error::new(ErrorKind::Unavailable, "connect", "connect_timeout", text))
    });
    Tried { name: name.to_owned(), found: found.map_err(with_cure) }
}

/// Adds what to look at if a server cannot be reached, unless the text names a cure: after a
/// semicolon.
fn with_cure(error: Error) -> Error {
    if !is_unreachable(error.code()) || error.message().contains("; ") {
        return error;
    }
    let text = format!("{}; is the server up, and can this machine reach its host and port?", error.message());
    Error::new(error.kind(), error.operation(), error.code().to_owned(), text).with_source(error)
}

/// Opens the store, validates its schema, and checks its cursors, that it has every log that is
/// named, that its subscriptions read those logs, that it is no standby, and that its role may do
/// what a relay does; with sources, also checks that it can receive.
async fn store(config: &Config) -> Result<String> {
    let store = open_store(&config.store).await?;
    validate_schema(store.as_ref()).await?;
    store.check_integrity().await?;
    let has = store.logs().await?;
    let of_subscriptions = config.subscriptions.iter().map(|it| &it.subscription.log);
    let of_sources = config.sources.iter().map(|it| &it.log);
    let named: Vec<LogName> = of_subscriptions.chain(of_sources).cloned().collect();
    check_logs("connect", &named, &has)?;
    for info in store.subscriptions().await? {
        let wanted = config.subscriptions.iter().find(|it| it.subscription.name == info.name);
        wanted.map_or(Ok(()), |wanted| check_log(&wanted.subscription, &info.log))?;
    }
    match config.sources.is_empty() {
        true => check_standby(store.as_ref()).await?,
        false => store.check_receiving().await?,
    }
    if !named.is_empty() {
        check_rights(&config.store, &named).await?;
    }
    Ok(format!("{} is reached, its schema is valid", config.store.describe()))
}
