//! `postbox check-config`: every fault, each at its line; with `--connect` also whether everything
//! can be reached.

use std::path::PathBuf;

use postbox_server::{Config, Secret, Tried, check_store_url};

use crate::args::Global;
use crate::failure::Failure;
use crate::output;

pub(super) async fn run(global: &Global, connect: bool) -> Result<(), Failure> {
    let path = global.config.clone().unwrap_or_else(|| PathBuf::from(postbox_server::FILE_DEFAULT));
    let (mut config, warnings) = Config::load(&path, true)?;
    let (subscriptions, sources) = (config.subscriptions.len(), config.sources.len());
    output::line(&format!("{}: right. {subscriptions} subscription(s), {sources} source(s)", path.display()))?;
    for warning in warnings {
        output::line(&format!("{}:{}: warning: {}", path.display(), warning.line, warning.text))?;
    }
    for config in &config.subscriptions {
        let subscription = &config.subscription;
        let topics: Vec<&str> = subscription.filter.topics.iter().map(|pattern| pattern.as_str()).collect();
        let topics = if topics.is_empty() { "*".to_owned() } else { topics.join(" ") };
        output::line(&format!(
            "  {} [{topics}] -> {} -> {}",
            subscription.log,
            subscription.name,
            config.sink.type_name()
        ))?;
    }
    for source in &config.sources {
        let from = source
            .path()
            .map_or_else(|| format!("{} {}", source.type_name(), source.name), |path| format!("POST {path}"));
        output::line(&format!("  {from} -> {}", source.log))?;
    }
    if !connect {
        return Ok(());
    }
    if let Some(url) = &global.store {
        check_store_url(url).map_err(|text| Failure::usage(format!("--store: {text}")))?;
        config.store.url = Secret::new(url.as_str());
    }
    let mut failures = Vec::new();
    for Tried { name, found } in postbox_server::connect(&config).await {
        match found {
            Ok(text) => output::line(&format!("{name}: {text}"))?,
            Err(error) => failures.push(format!("{name}: {}", Failure::from(error).text())),
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(Failure::failed(failures.join("\n"))) }
}
