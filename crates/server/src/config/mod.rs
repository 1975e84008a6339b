//! The configuration: one TOML file, checked as a whole.
//!
//! [`Config::parse`] reports every fault at once, each as `postbox.toml:LINE: what, and how to fix
//! it`. Unknown keys are refused with the nearest known name, because a misspelt `max_atempts` that
//! is silently ignored is found in production.
//!
//! Secrets may be written as `env:NAME`; the file then holds nothing worth stealing.

mod many;
mod service;
mod subscription;
mod telemetry;

use std::path::{Path, PathBuf};

use postbox_config::{
    Fault, Faults, ReadOptions, Section, Table as _, commented_file, duration_text, nested, read, suggestion, table,
};
use postbox_core::SubscriptionName;
use postbox_core::limits::MESSAGE_IDS_AGE_MIN;
use serde_json::Value;
pub use service::{LogConfig, LogFormat, RetentionConfig, ServerConfig};
pub use subscription::SubscriptionConfig;

use crate::lease::{LeaseChoice, lease};
use crate::sources::{NamedSource, sources};
use crate::stores::{NamedStore, StoreConfig, check_store_url, stores};
pub(crate) use subscription::store_names;
use subscription::subscriptions;
pub use telemetry::{TelemetryConfig, check_collector_url};

/// The name of the file when none is given.
pub const FILE_DEFAULT: &str = "postbox.toml";

/// The variable that names the store, as `--store` does.
pub const STORE_VARIABLE: &str = "POSTBOX_STORE";

/// Each variable configures one subscription of the outbox when there is no file: its name and its
/// sink. `DISPATCHER_URL` may be in a private network, because the operator who sets it chose that
/// address.
const ENVIRONMENT: [(&str, &str, &str); 2] = [
    ("SQS_QUEUE_URL", "sqs", r#"{ type = "sqs", queue_url = VALUE }"#),
    (
        "DISPATCHER_URL",
        "dispatcher",
        r#"{ type = "http", url = VALUE, allow = ["127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"] }"#,
    ),
];

/// Why no configuration could be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read.
    #[error(
        "{}: cannot be read: {source}; name another file with --config, or write one with `postbox init`",
        path.display()
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file has faults.
    #[error("{0}")]
    Faults(#[from] Faults),
}

table! {
    /// A whole configuration.
    #[check(check)]
    pub struct Config {
        /// Where the logs are.
        store: StoreConfig = nested::<StoreConfig>();
        /// Where the logs are, where there are several.
        stores: Vec<NamedStore> = stores(), unset("", "acme");
        // Read before the sinks: they need the listen address, which they must not call.
        /// The HTTP server.
        server: ServerConfig = nested::<ServerConfig>();
        /// Who reads which log, and where the events go. One section for each reader.
        subscriptions: Vec<SubscriptionConfig> = subscriptions(), unset("", "orders-out");
        /// Where messages come from.
        sources: Vec<NamedSource> = sources().for_delivery(), unset("", "partner");
        /// Where relays take the leases of their lanes.
        ///
        /// `"redis"` is for rules that ask for it ([Redis](redis.md#leases-in-redis)).
        lease: LeaseChoice = lease().for_delivery();
        /// What is deleted, and when.
        retention: RetentionConfig = nested::<RetentionConfig>();
        /// The program's log.
        log: LogConfig = nested::<LogConfig>().for_delivery();
        /// Where traces go.
        telemetry: TelemetryConfig = nested::<TelemetryConfig>().for_delivery();
    }
}

impl Config {
    /// Reads a configuration, with secrets from the environment.
    pub fn parse(text: &str) -> Result<Self, Faults> {
        Self::parse_with(text, from_environment(FILE_DEFAULT)).map(|(config, _)| config)
    }

    /// Reads a configuration with these options. Also returns warnings: what is allowed but risky,
    /// or with `delivers = false` faults of what only delivery needs.
    pub fn parse_with(text: &str, options: ReadOptions<'_>) -> Result<(Self, Vec<Fault>), Faults> {
        read(text, options)
    }

    /// Reads a configuration from a file. Files that it names are checked only by a program that
    /// delivers. `store` is the value of `--store`, with which the variable of `[store] url` may be
    /// missing. Faults begin with the path as given.
    pub fn load(path: &Path, store: Option<&str>, delivers: bool) -> Result<(Self, Vec<Fault>), LoadError> {
        let text = std::fs::read_to_string(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
        let file = path.display().to_string();
        // A file that `init` wrote names the variable, and `--store` is the same as the variable. A
        // URL that is wrong is no fault of the line: it is reported by whoever chooses the store.
        let env = |name: &str| match (name, store) {
            (STORE_VARIABLE, Some(store)) => check_store_url(store).is_ok().then(|| store.to_owned()),
            _ => std::env::var(name).ok(),
        };
        let replaced = store.map(|_| "store.url");
        Ok(Self::parse_with(&text, ReadOptions { file: &file, env: &env, delivers, files: delivers, replaced })?)
    }

    /// Returns the configuration without a file: the defaults, and one subscription for each of
    /// `SQS_QUEUE_URL` and `DISPATCHER_URL` that is set. Also returns warnings, as
    /// [`Config::load`] does.
    pub fn without_file(env: impl Fn(&str) -> Option<String>, delivers: bool) -> Result<(Self, Vec<Fault>), LoadError> {
        let set = ENVIRONMENT.iter().filter_map(|(variable, name, sink)| {
            let value = env(variable).filter(|value| !value.is_empty())?;
            // A JSON string is also a TOML string.
            let value = Value::from(value).to_string();
            Some((*variable, format!("[subscriptions.{name}]\nsink = {}\n", sink.replace("VALUE", &value))))
        });
        let (variables, texts): (Vec<&str>, Vec<String>) = set.unzip();
        // Nobody wrote these lines, two for each variable.
        let named = |mut fault: Fault| {
            if let Some(variable) = fault.line.checked_sub(1).and_then(|before| variables.get(before / 2)) {
                fault.text = format!("{variable}: {}", fault.text);
            }
            fault
        };
        let file = "environment";
        match Self::parse_with(&texts.concat(), ReadOptions { delivers, ..from_environment(file) }) {
            Ok((config, warnings)) => Ok((config, warnings.into_iter().map(named).collect())),
            Err(faults) => Err(Faults::new(file, faults.iter().cloned().map(named).collect()).into()),
        }
    }

    fn check(&self, root: &Section<'_>) {
        self.check_stores(root);
        self.check_rates(root);
        // The commands for one tenant may read a file that `run` refuses.
        if root.reader.options.delivers {
            self.check_tenants(root);
        }
        root.reader.for_delivery(|| {
            self.check_sources(root);
            self.check_memory(root);
            self.check_freshness(root);
        });
    }

    /// Checks `rate_of`: it names a subscription with a rate of its own.
    fn check_rates(&self, root: &Section<'_>) {
        let known: Vec<&str> = self.subscriptions.iter().map(|it| it.subscription.name.as_str()).collect();
        for it in &self.subscriptions {
            let Some(named) = it.rate_of.as_ref().map(SubscriptionName::as_str) else { continue };
            let has = |key| root.line_at(&["subscriptions", named, key]).is_some();
            let fault = if !known.contains(&named) {
                format!("there is no [subscriptions.{named}]; {}", suggestion(named, &known))
            } else if has("rate_of") {
                format!("subscriptions.{named} shares a rate itself; name the subscription that has the rate")
            } else if !has("rate") {
                format!("subscriptions.{named} has no rate to share; write one there, e.g. rate = \"50/s\"")
            } else {
                continue;
            };
            let name = it.subscription.name.as_str();
            let line = root.line_at(&["subscriptions", name, "rate_of"]).unwrap_or_default();
            root.reader.fault(line, format!("subscriptions.{name}.rate_of: {fault}"));
        }
    }

    /// Checks `remember_ids`: an id that is forgotten while its sender still repeats the message
    /// would let the message be applied twice. The minimum is 7 days whatever the sender's horizon
    /// says, because a horizon is only what the sender's documentation promises, and people resend
    /// messages by hand.
    fn check_memory(&self, root: &Section<'_>) {
        let remembered = self.retention.remember_ids;
        let written = root.line_at(&["retention", "remember_ids"]);
        match self.sources.iter().max_by_key(|source| source.repeats_for()) {
            Some(source) if remembered < source.repeats_for() && source.repeats_for() > MESSAGE_IDS_AGE_MIN => {
                let (remembered, horizon) = (duration_text(remembered), duration_text(source.repeats_for()));
                let source = source.name.as_str();
                let line = written.or_else(|| root.line_at(&["sources", source]));
                let text = format!(
                    "retention.remember_ids is {remembered:?}, but the sender of sources.{source} repeats a message \
                     for {horizon:?}: one repeated after its id is forgotten would be applied twice; write \
                     remember_ids = {horizon:?} or longer, or sources.{source}.retry_horizon if it gives up sooner"
                );
                root.reader.fault(line.unwrap_or_default(), text);
            }
            _ if remembered < MESSAGE_IDS_AGE_MIN => {
                let (remembered, least) = (duration_text(remembered), duration_text(MESSAGE_IDS_AGE_MIN));
                let text = format!(
                    "retention.remember_ids is {remembered:?}: a message repeated after that would be applied twice; \
                     write remember_ids = {least:?} (the least) or longer"
                );
                root.reader.fault(written.unwrap_or_default(), text);
            }
            _ => {}
        }
    }

    /// Checks `tolerance`: a message must be too old to be accepted by the time its id is
    /// forgotten.
    fn check_freshness(&self, root: &Section<'_>) {
        let remembered = self.retention.remember_ids;
        for source in &self.sources {
            let Some(fresh) = source.fresh_for().filter(|fresh| *fresh >= remembered) else { continue };
            let (name, fresh, remembered) = (source.name.as_str(), duration_text(fresh), duration_text(remembered));
            let text = format!(
                "sources.{name}.tolerance accepts a replay of a message for up to {fresh:?} (twice the tolerance), \
                 but its id is remembered for {remembered:?} only: a later replay would be applied twice; write \
                 tolerance = \"5m\", or a longer retention.remember_ids"
            );
            root.reader.fault(root.line_at(&["sources", name, "tolerance"]).unwrap_or_default(), text);
        }
    }
}

/// Takes all secrets from the environment; none may be missing. Files that the configuration names
/// are not read.
fn from_environment(file: &str) -> ReadOptions<'_> {
    ReadOptions { file, env: &|name| std::env::var(name).ok(), delivers: true, files: false, replaced: None }
}

/// The commented file that `postbox init` writes; every value in it is the default.
pub fn default_toml() -> String {
    "# Postbox. Active lines hold the defaults. Commented-out lines are examples: uncomment what you\n\
     # need; each names its default, or that it is required.\n\
     # Check it with `postbox check-config`. Secrets can be written as \"env:NAME\".\n\
     # Relative paths are relative to the working folder.\n\
     # All keys, explained: docs/guide/configuration.md.\n"
        .to_owned()
        + &commented_file(&Config::keys())
}

/// The JSON Schema of the file (draft 2020-12), for editors.
pub fn json_schema() -> Value {
    postbox_config::json_schema(FILE_DEFAULT, &Config::keys())
}

#[cfg(test)]
mod tests;
