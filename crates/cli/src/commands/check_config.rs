//! `postbox check-config`: reports every fault with its line; with `--connect` also checks that
//! everything can be reached.

use postbox_core::{Filter, StoreName, Subscription};
use postbox_server::{Config, Fault, LoadError, Tried};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::Global;
use crate::context::{choose_store, config_name, read_config, require_store};
use crate::failure::Failure;
use crate::stores::with_store;
use crate::{logging, output, telemetry};

pub(super) async fn run(global: &Global, connect: bool) -> Result<(), Failure> {
    require_store(global)?;
    let file = config_name(global);
    let (config, warnings) = match read_config(global, true) {
        Ok(read) => read,
        Err(error) => {
            if let (true, LoadError::Faults(faults)) = (global.json, &error) {
                output::json(&json!({ "file": file, "faults": lines(faults.iter()) }));
            }
            return Err(error.into());
        }
    };
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
    let (reached, failed) = tried(&chosen).await;
    reached.iter().for_each(|it| output::line(&format!("{}: {}", it.name, it.found)));
    ended(&failed)
}

/// A part that could be reached.
#[derive(Serialize)]
struct Reached {
    name: String,
    found: String,
}

/// A part that could not be reached, or is wrong.
#[derive(Serialize)]
struct Failed {
    name: String,
    code: String,
    /// What is wrong, and how to fix it.
    error: String,
}

/// The failures of all parts together.
fn ended(failed: &[Failed]) -> Result<(), Failure> {
    let lines: Vec<String> = failed.iter().map(|it| format!("{}: {}", it.name, it.error)).collect();
    if lines.is_empty() { Ok(()) } else { Err(Failure::failed(lines.join("\n"))) }
}

/// Tries every part.
async fn tried(config: &Config) -> (Vec<Reached>, Vec<Failed>) {
    let (mut reached, mut failed) = (Vec::new(), Vec::new());
    for Tried { name, found } in postbox_server::connect(config).await {
        match found {
            Ok(found) => reached.push(Reached { name, found }),
            Err(error) => {
                let code = error.code().to_owned();
                let failure = Failure::from(error);
                let store: Option<StoreName> = name.strip_prefix("stores.").and_then(|it| it.parse().ok());
                let text = store.map(|store| with_store(failure.text(), &store));
                let error = text.unwrap_or_else(|| failure.text().to_owned());
                failed.push(Failed { name, code, error });
            }
        }
    }
    (reached, failed)
}

/// Faults or warnings, each with its line; 0 if it belongs to none.
fn lines<'a>(faults: impl Iterator<Item = &'a Fault>) -> Vec<Value> {
    faults.map(|fault| json!({ "line": fault.line, "text": fault.text })).collect()
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
    let mut said = json!({
        "file": file,
        "stores": config.store_names(),
        "subscriptions": subscriptions.collect::<Vec<_>>(),
        "sources": sources.collect::<Vec<_>>(),
        "warnings": lines(warnings.iter()),
        "faults": [],
    });
    let mut result = Ok(());
    if let Some(chosen) = connect {
        let (reached, failed) = tried(chosen).await;
        said["reached"] = json!(reached);
        said["failed"] = json!(failed);
        result = ended(&failed);
    }
    output::json(&said);
    result
}

/// Names the stores that have it, if not all do.
fn only(stores: &[StoreName]) -> String {
    let names: Vec<&str> = stores.iter().map(StoreName::as_str).collect();
    if names.is_empty() { String::new() } else { format!(" (only {})", names.join(", ")) }
}
