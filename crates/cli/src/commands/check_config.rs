//! `postbox check-config`: reports every fault with its line; with `--connect` also checks that
//! everything can be reached.

use postbox_core::{Filter, StoreName, Subscription};
use postbox_server::{Config, Fault, Tried};
use serde_json::json;

use crate::args::Global;
use crate::context::{choose_store, config_name, read_config, require_store};
use crate::failure::Failure;
use crate::stores::with_store;
use crate::{logging, output, telemetry};

pub(super) async fn run(global: &Global, connect: bool) -> Result<(), Failure> {
    require_store(global)?;
    let file = config_name(global);
    let (config, warnings) = read_config(global, true)?;
    telemetry::check(&config.telemetry)?;
    logging::filter(&config.log.level)?;
    // The listing is of the whole file, also if one of several stores is chosen.
    let mut chosen = config.clone();
    choose_store(global, &mut chosen)?;
    let (subscriptions, sources) = (config.subscriptions.len(), config.sources.len());
    let stores = match config.stores.len() {
        0 => String::new(),
        stores => format!("{stores} store(s), "),
    };
    if global.json {
        return check_as_json(&config, &file, &warnings, connect.then_some(&chosen)).await;
    }
    output::line(&format!("{file}: valid. {stores}{subscriptions} subscription(s), {sources} source(s)"));
    for warning in warnings {
        output::line(&format!("{file}:{}: warning: {}", warning.line, warning.text));
    }
    for one in &config.subscriptions {
        let subscription = &one.subscription;
        output::line(&format!(
            "  {} [{}] -> {} -> {}{}",
            subscription.log,
            subscription.filter,
            subscription.name,
            one.sink.type_name(),
            only(&one.stores)
        ));
    }
    for source in &config.sources {
        let from = match source.path() {
            None => format!("{} {}", source.type_name(), source.name),
            Some(path) if config.stores.is_empty() => format!("POST {path}"),
            Some(_) => format!("POST /in/STORE/{}", source.name),
        };
        output::line(&format!("  {from} -> {}{}", source.log, only(&source.stores)));
    }
    if !connect {
        return Ok(());
    }
    let (reached, ended) = tried(&chosen).await;
    reached.iter().for_each(|(name, text)| output::line(&format!("{name}: {text}")));
    ended
}

/// The parts that could be reached, by name, and the failures of the others.
async fn tried(config: &Config) -> (Vec<(String, String)>, Result<(), Failure>) {
    let (mut reached, mut failures) = (Vec::new(), Vec::new());
    for Tried { name, found } in postbox_server::connect(config).await {
        match found {
            Ok(text) => reached.push((name, text)),
            Err(error) => {
                let failure = Failure::from(error);
                let store: Option<StoreName> = name.strip_prefix("stores.").and_then(|it| it.parse().ok());
                let text = store.map(|store| with_store(failure.text(), &store));
                failures.push(format!("{name}: {}", text.as_deref().unwrap_or(failure.text())));
            }
        }
    }
    (reached, if failures.is_empty() { Ok(()) } else { Err(Failure::failed(failures.join("\n"))) })
}

async fn check_as_json(
    config: &Config,
    file: &str,
    warnings: &[Fault],
    connect: Option<&Config>,
) -> Result<(), Failure> {
    let subscriptions = config.subscriptions.iter().map(|one| {
        let Subscription { name, log, filter, .. } = &one.subscription;
        let Filter { topics, tenant, kinds, aggregates, headers } = filter;
        json!({ "subscription": name, "log": log, "topics": topics, "tenant": tenant, "kinds": kinds,
            "aggregates": aggregates, "headers": headers, "sink": one.sink.type_name(), "stores": one.stores })
    });
    let sources = config.sources.iter().map(|source| {
        let (name, kind, log) = (&source.name, source.type_name(), &source.log);
        json!({ "source": name, "type": kind, "path": source.path(), "log": log, "stores": source.stores })
    });
    let warnings = warnings.iter().map(|warning| json!({ "line": warning.line, "text": warning.text }));
    let mut said = json!({
        "file": file,
        "stores": config.store_names(),
        "subscriptions": subscriptions.collect::<Vec<_>>(),
        "sources": sources.collect::<Vec<_>>(),
        "warnings": warnings.collect::<Vec<_>>(),
    });
    let mut ended = Ok(());
    if let Some(chosen) = connect {
        let (reached, failed) = tried(chosen).await;
        said["reached"] = reached.iter().map(|(name, found)| json!({ "name": name, "found": found })).collect();
        ended = failed;
    }
    output::json(&said);
    ended
}

/// Names the stores that have it, if not all do.
fn only(stores: &[StoreName]) -> String {
    let names: Vec<&str> = stores.iter().map(StoreName::as_str).collect();
    if names.is_empty() { String::new() } else { format!(" (only {})", names.join(", ")) }
}
