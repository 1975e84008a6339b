//! `postbox check-config`: every fault, each at its line.

use std::path::PathBuf;

use postbox_server::Config;

use crate::args::Global;
use crate::failure::Failure;
use crate::output;

pub(super) fn run(global: &Global) -> Result<(), Failure> {
    let path = global.config.clone().unwrap_or_else(|| PathBuf::from(postbox_server::FILE_DEFAULT));
    let (config, warnings) = Config::load(&path, true)?;
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
    Ok(())
}
