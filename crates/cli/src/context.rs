//! What most commands need: the configuration, the store, and the selected subscriptions.

use std::path::Path;
use std::sync::Arc;

use postbox_core::{Count, EventId, IdPrefix, LogName, Store, StoreName, SubscriptionInfo, SubscriptionName};
use postbox_server::status;
use postbox_server::{
    Config, Fault, Faults, LoadError, LogConfig, LogFormat, Secret, SubscriptionConfig, check_store_url, open_store,
    validate_schema,
};
use tracing::warn;

use crate::args::Global;
use crate::failure::Failure;
use crate::output;
use crate::stores;
use crate::telemetry;

/// The file of the default store.
const STORE_FILE_DEFAULT: &str = "postbox.db";
/// Most store names in an error.
const NAMES_SHOWN: usize = 10;

/// What a command needs the configuration for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Delivers and receives until stopped: every secret must be there, and the lifecycle is
    /// logged.
    Serve,
    /// Delivers once: every secret must be there.
    Deliver,
    /// Only reads or administers the store.
    Inspect,
}

/// A store, its configuration, and the selection on the command line.
pub(crate) struct Context {
    /// The store's name, where there are several.
    pub(crate) name: Option<StoreName>,
    /// Its share of the configuration, as if it were the only store.
    pub(crate) config: Config,
    /// The faults of the whole configuration that were read over, by line: `FILE:LINE: text`. What
    /// they are about has its default.
    pub(crate) faults: Vec<String>,
    /// Only this log and its subscriptions.
    pub(crate) log: Option<LogName>,
    /// Only this subscription.
    pub(crate) only: Option<SubscriptionName>,
}

impl Context {
    /// Reads the configuration and starts logging, for commands about one store. With several
    /// stores, `--store` selects one.
    pub(crate) fn load(global: &Global, purpose: Purpose) -> Result<Self, Failure> {
        let mut all = Self::load_each(global, purpose)?;
        match all.len() {
            1 => Ok(all.remove(0)),
            _ => {
                let names: Vec<&str> = all.iter().filter_map(|it| Some(it.name.as_ref()?.as_str())).collect();
                Err(Failure::usage(format!(
                    "this command needs one of several stores; name it: --store {}",
                    few(&names)
                )))
            }
        }
    }

    /// The same for commands about all stores.
    pub(crate) fn load_each(global: &Global, purpose: Purpose) -> Result<Vec<Self>, Failure> {
        let (config, faults) = load(global, purpose)?;
        if config.per_store().iter().any(|(_, share)| share.store.is_in_memory()) {
            return Err(Failure::usage(
                "the store is in memory: it begins empty and is gone when its program ends, so only `postbox run` can \
                 use it; name a lasting one, e.g. --store sqlite:PATH",
            ));
        }
        let context = |(name, config)| {
            let (faults, log, only) = (faults.clone(), global.log.clone(), global.only.clone());
            Self { name, config, faults, log, only }
        };
        let mut all: Vec<Self> = config.per_store().into_iter().map(context).collect();
        // A subscription that only some stores have is looked for in those.
        if all.iter().any(Self::has_only) {
            all.retain(Self::has_only);
        }
        Ok(all)
    }

    fn has_only(&self) -> bool {
        let mut names = self.config.subscriptions.iter().map(|config| &config.subscription.name);
        self.only.as_ref().is_some_and(|only| names.any(|name| name == only))
    }

    /// Prefixes a text with the store's name, where there are several, and gives it to the commands
    /// in the text.
    pub(crate) fn named(&self, text: &str) -> String {
        let text = self.with_store(text);
        match &self.name {
            Some(name) => format!("{name}: {text}"),
            None => text,
        }
    }

    /// Gives the store's name to the commands in a text, where there are several: without it most
    /// of them are refused.
    pub(crate) fn with_store(&self, text: &str) -> String {
        self.name.as_ref().map_or_else(|| text.to_owned(), |name| stores::with_store(text, name))
    }

    /// Prints a note about this store.
    pub(crate) fn note(&self, text: &str) {
        output::note(&self.named(text));
    }

    /// Opens the store, and rejects a `--log` that does not exist: an empty result would be
    /// misleading.
    pub(crate) async fn store(&self) -> Result<Arc<dyn Store>, Failure> {
        let store = self.any_store().await?;
        self.known_log(store.as_ref()).await?;
        Ok(store)
    }

    /// The same for a command that changes something: a schema of another version is refused.
    pub(crate) async fn store_to_change(&self) -> Result<Arc<dyn Store>, Failure> {
        let store = self.any_store().await?;
        validate_schema(store.as_ref()).await?;
        self.known_log(store.as_ref()).await?;
        Ok(store)
    }

    /// The same for `send`. For a role that may only append, the version is not checked: it cannot
    /// read it.
    pub(crate) async fn store_to_append(&self) -> Result<Arc<dyn Store>, Failure> {
        let store = self.any_store().await?;
        match validate_schema(store.as_ref()).await {
            Err(error) if error.code() != "permission_denied" => return Err(error.into()),
            _ => {}
        }
        self.known_log(store.as_ref()).await?;
        Ok(store)
    }

    /// Opens the store without checking `--log`.
    pub(crate) async fn any_store(&self) -> Result<Arc<dyn Store>, Failure> {
        Ok(open_store(&self.config.store).await?)
    }

    /// Resolves ids that may be abbreviated.
    pub(crate) async fn event_ids(&self, typed: &[IdPrefix]) -> Result<Vec<EventId>, Failure> {
        let mut ids = Vec::with_capacity(typed.len());
        let mut store = None;
        for prefix in typed {
            if let Some(id) = prefix.whole() {
                ids.push(id);
                continue;
            }
            let store = match &store {
                Some(store) => store,
                None => &*store.insert(self.store().await?),
            };
            ids.push(self.event_id(store.as_ref(), prefix).await?);
        }
        Ok(ids)
    }

    /// Resolves a prefix to the only id that begins with it, in the selected logs.
    async fn event_id(&self, store: &dyn Store, prefix: &IdPrefix) -> Result<EventId, Failure> {
        let logs = match &self.log {
            Some(log) => vec![log.clone()],
            None => store.logs().await?,
        };
        let mut found = Vec::new();
        for log in &logs {
            found.extend(store.ids(log, prefix, 2).await?);
        }
        found.sort();
        found.dedup();
        match &found[..] {
            [id] => Ok(*id),
            [] => Err(self.no_event(self.log.as_ref(), &format!("whose id begins with {prefix}"))),
            [first, second, ..] => Err(Failure::usage(format!(
                "several ids begin with {prefix}, e.g. {first} and {second}; give more digits"
            ))),
        }
    }

    /// The error for an event that does not exist in this log, or in all of them.
    pub(crate) fn no_event(&self, looked_at: Option<&LogName>, which: &str) -> Failure {
        let narrowed = match (&self.only, &self.log) {
            (Some(_), _) => "--subscription",
            (None, Some(_)) => "--log",
            (None, None) => "",
        };
        Failure::failed(match looked_at {
            Some(log) if !narrowed.is_empty() => format!(
                "the {log} has no event {which}; it was never committed, was pruned, or is in another log: leave \
                 {narrowed} out"
            ),
            _ => format!("no log has an event {which}; it was never committed, or was pruned"),
        })
    }

    /// Rejects a `--log` that neither the store nor the configuration has.
    pub(crate) async fn known_log(&self, store: &dyn Store) -> Result<(), Failure> {
        let Some(log) = &self.log else { return Ok(()) };
        let mut known = store.logs().await?;
        known.extend(self.config.subscriptions.iter().map(|config| config.subscription.log.clone()));
        known.extend(self.config.sources.iter().map(|source| source.log.clone()));
        if known.contains(log) {
            return Ok(());
        }
        known.sort();
        known.dedup();
        let known = known.iter().map(LogName::as_str).collect::<Vec<_>>().join(", ");
        Err(Failure::usage(format!("there is no log {log}; there are: {known}")))
    }

    /// The selected logs with events that no subscription reads, and their counts. One tenant does
    /// not see who reads for all of them.
    pub(crate) async fn unread(&self, store: &dyn Store) -> postbox_core::Result<Vec<(LogName, Count)>> {
        if self.only.is_some() || self.config.store.is_of_one_tenant() {
            return Ok(Vec::new());
        }
        status::unread(store, &store.subscriptions().await?, self.log.as_ref()).await
    }

    /// The configured subscriptions that are selected.
    pub(crate) fn configured(&self) -> Result<Vec<SubscriptionConfig>, Failure> {
        let all = self.config.subscriptions.iter();
        self.refuse_another_log(all.clone().map(|config| (&config.subscription.name, &config.subscription.log)))?;
        let meant: Vec<_> = all.filter(|config| self.means(config)).cloned().collect();
        match &self.only {
            Some(only) if meant.is_empty() => {
                let known = self.config.subscriptions.iter().map(|config| config.subscription.name.to_string());
                Err(unknown_subscription(only.as_str(), known.collect()))
            }
            _ => Ok(meant),
        }
    }

    /// Whether a configured subscription is selected.
    pub(crate) fn means(&self, config: &SubscriptionConfig) -> bool {
        self.only.as_ref().is_none_or(|only| *only == config.subscription.name)
            && self.log.as_ref().is_none_or(|log| *log == config.subscription.log)
    }

    /// The selected subscriptions in the store. Read-only: `run` and `dispatch` create the
    /// configured ones.
    pub(crate) async fn registered(&self, store: &dyn Store) -> Result<Vec<SubscriptionInfo>, Failure> {
        let mut infos = store.subscriptions().await?;
        self.refuse_another_log(infos.iter().map(|info| (&info.name, &info.log)))?;
        infos.retain(|info| self.log.as_ref().is_none_or(|log| info.log == *log));
        let Some(only) = &self.only else { return Ok(infos) };
        if self.never_run(&infos).next().is_some() {
            return Err(Failure::failed(self.why_unread(only, &infos)));
        }
        let known: Vec<String> = infos.iter().map(|info| info.name.to_string()).collect();
        let meant: Vec<_> = infos.into_iter().filter(|info| info.name == *only).collect();
        if meant.is_empty() { Err(unknown_subscription(only.as_str(), known)) } else { Ok(meant) }
    }

    /// Rejects a `--subscription` that reads another log than `--log`.
    fn refuse_another_log<'a>(
        &self,
        mut all: impl Iterator<Item = (&'a SubscriptionName, &'a LogName)>,
    ) -> Result<(), Failure> {
        let (Some(only), Some(log)) = (&self.only, &self.log) else { return Ok(()) };
        match all.find(|(name, of)| *name == only && *of != log) {
            Some((_, of)) => Err(Failure::usage(format!("{only} reads the {of}, not the {log}; leave --log out"))),
            None => Ok(()),
        }
    }

    /// The selected configured subscriptions that the store does not have.
    pub(crate) fn never_run<'a>(
        &'a self,
        infos: &'a [SubscriptionInfo],
    ) -> impl Iterator<Item = &'a SubscriptionName> + 'a {
        self.never_run_at_all(infos).filter(|name| self.only.as_ref().is_none_or(|only| only == *name))
    }

    /// The same without `--subscription`: a change to a log concerns all its subscriptions.
    pub(crate) fn never_run_at_all<'a>(
        &'a self,
        infos: &'a [SubscriptionInfo],
    ) -> impl Iterator<Item = &'a SubscriptionName> + 'a {
        // One tenant does not see the subscriptions that read for all tenants.
        let hidden = self.config.store.is_of_one_tenant();
        let configured = self.config.subscriptions.iter().filter(move |_| !hidden).map(|config| &config.subscription);
        let meant = configured.filter(|wanted| self.log.as_ref().is_none_or(|log| wanted.log == *log));
        meant.filter(|wanted| infos.iter().all(|info| info.name != wanted.name)).map(|wanted| &wanted.name)
    }

    /// Explains why nobody reads for a configured subscription that the store does not have, with
    /// the cure.
    pub(crate) fn why_unread(&self, name: &SubscriptionName, infos: &[SubscriptionInfo]) -> String {
        format!("{name} was never run, so nothing is delivered for it; {}", self.start_or_rename(infos))
    }

    /// The cure: start it; or rename it, if the store has it under another name, because under this
    /// one it would start from the beginning.
    pub(crate) fn start_or_rename(&self, infos: &[SubscriptionInfo]) -> String {
        let configured = |info: &&SubscriptionInfo| {
            self.config.subscriptions.iter().any(|config| config.subscription.name == info.name)
        };
        let strangers: Vec<&str> =
            infos.iter().filter(|info| !configured(info)).map(|info| info.name.as_str()).collect();
        match &strangers[..] {
            [] => "start `postbox run`".to_owned(),
            known => format!(
                "the store has {}, which the configuration has not: if it was renamed, write that name; otherwise \
                 `postbox run` creates it, and delivers everything from the beginning",
                known.join(", ")
            ),
        }
    }

    /// As [`Self::registered`], but at least one.
    pub(crate) async fn some_registered(&self, store: &dyn Store) -> Result<Vec<SubscriptionInfo>, Failure> {
        let infos = self.registered(store).await?;
        if !infos.is_empty() {
            return Ok(infos);
        }
        Err(Failure::failed(match (self.never_run(&infos).next(), &self.log) {
            (Some(name), _) => self.why_unread(name, &infos),
            (None, _) if self.config.store.is_of_one_tenant() => NO_SUBSCRIPTION_OF_TENANT.to_owned(),
            (None, None) => {
                "there is no subscription yet; add [subscriptions.NAME] to the configuration and name it with --config"
                    .to_owned()
            }
            (None, Some(log)) => format!(
                "no subscription reads {log} yet; add [subscriptions.NAME] with log = \"{log}\" to the configuration and name it with --config"
            ),
        }))
    }

    /// The cure for events that no subscription wants, as this store can carry it out.
    pub(crate) fn cure_of_unrouted(&self, cure: &str) -> String {
        match self.config.store.is_of_one_tenant() {
            true => cure.replace(status::OR_DELETE, "; whoever runs `postbox run` for all tenants can delete them"),
            false => cure.to_owned(),
        }
    }

    /// The cure for a log that no subscription reads.
    pub(crate) fn reader_wanted(&self, log: &LogName) -> String {
        match self.config.subscriptions.iter().any(|config| config.subscription.log == *log) {
            true => "start `postbox run`".to_owned(),
            false => format!(
                "add [subscriptions.NAME] with log = \"{log}\" to postbox.toml and start `postbox run`; it gets all of \
                 them, or with start = \"now\" only later ones"
            ),
        }
    }
}

/// Why one tenant may see no subscription.
pub(crate) const NO_SUBSCRIPTION_OF_TENANT: &str =
    "the tenant has no subscription of its own; those that read for all tenants are not shown to it";

fn unknown_subscription(name: &str, mut known: Vec<String>) -> Failure {
    known.sort();
    let cure =
        if known.is_empty() { "there is none yet".to_owned() } else { format!("known are {}", known.join(", ")) };
    Failure::usage(format!("no subscription is called {name}; {cure}"))
}

/// Loads the configuration, applies the arguments, and starts the logging that they ask for. Also
/// returns the faults with which `postbox run` does not start.
pub(crate) fn load(global: &Global, purpose: Purpose) -> Result<(Config, Vec<String>), Failure> {
    let (mut config, warnings) = read_config(global, purpose != Purpose::Inspect)?;
    let faults: Vec<String> = match purpose {
        Purpose::Inspect => {
            Faults::new(&config_name(global), warnings).to_string().lines().map(str::to_owned).collect()
        }
        Purpose::Serve | Purpose::Deliver => Vec::new(),
    };
    if let Some(first) = faults.first() {
        output::note(&format!(
            "the configuration has faults with which `postbox run` does not start, the first at {first}; \
             `postbox check-config` names all"
        ));
    }
    choose_store(global, &mut config)?;
    if let Some(level) = &global.log_level {
        config.log.level.clone_from(level);
    } else if purpose != Purpose::Serve && config.log == LogConfig::default() {
        // Commands that end by themselves log no lifecycle.
        config.log.level = "warn".into();
    }
    if global.log_json {
        config.log.format = LogFormat::Json;
    }
    let traces = match purpose {
        Purpose::Inspect => None,
        Purpose::Serve | Purpose::Deliver => telemetry::start(&config.telemetry)?,
    };
    crate::logging::start(&config.log, traces)?;
    if purpose != Purpose::Inspect {
        for (name, share) in config.per_store() {
            if let Some(risk) = share.store.risk() {
                warn!(store = name.as_ref().map(StoreName::as_str), code = "store_unverified", why = %risk, "store unverified");
            }
        }
    }
    Ok((config, faults))
}

/// Applies `--store`: another store than the configured one, or one of several.
pub(crate) fn choose_store(global: &Global, config: &mut Config) -> Result<(), Failure> {
    let Some(chosen) = &global.store else { return refuse_tenant(config) };
    let names = config.store_names();
    if names.contains(&chosen.as_str()) {
        config.stores.retain(|store| store.name.as_str() == chosen);
        return Ok(());
    }
    if !names.is_empty() {
        // It may be a URL with a password in it.
        let shown = if chosen.contains(':') { "a URL".to_owned() } else { format!("{chosen:?}") };
        let text = format!(
            "--store, or POSTBOX_STORE: the configuration has several stores, and {shown} is none of their names; known are {}",
            few(&names)
        );
        return Err(Failure::usage(text));
    }
    check_store_url(chosen).map_err(|text| Failure::usage(format!("--store, or POSTBOX_STORE: {text}")))?;
    // An exported variable is easily forgotten.
    let is_forgotten = global.is_store_of_environment && config.store.url.expose() != chosen;
    config.store.url_from = is_forgotten.then_some(postbox_server::STORE_VARIABLE);
    config.store.url = Secret::new(chosen.as_str());
    refuse_tenant(config)
}

/// Refuses a tenant that the chosen store ignores: a command for one tenant would change the events
/// of all.
fn refuse_tenant(config: &Config) -> Result<(), Failure> {
    let refused = config.store.tenant_refused();
    refused.map_or(Ok(()), |why| Err(Failure::usage(format!("`tenant` in [store]: {why}"))))
}

/// The first names, as many as a person can read.
fn few(names: &[&str]) -> String {
    let shown = names.iter().take(NAMES_SHOWN).copied().collect::<Vec<_>>().join("|");
    match names.len().saturating_sub(NAMES_SHOWN) {
        0 => shown,
        more => format!("{shown}, or one of {more} more"),
    }
}

/// Rejects a folder in which nothing names a store. The default store would be a new file there,
/// and the cure for its missing tables would create them in the wrong place.
pub(crate) fn require_store(global: &Global) -> Result<(), Failure> {
    let file = Path::new(postbox_server::FILE_DEFAULT);
    if global.config.is_some() || global.store.is_some() || file.exists() || Path::new(STORE_FILE_DEFAULT).exists() {
        return Ok(());
    }
    Err(Failure::usage(
        "there is no postbox.toml in this folder, and no store is named; go to the folder that has it, or pass \
         --config FILE or --store URL, or set POSTBOX_STORE; to start anew: postbox init, then postbox migrate up",
    ))
}

/// The named file; else `postbox.toml` if it exists.
pub(crate) fn config_file(global: &Global) -> Option<&Path> {
    let usual = Path::new(postbox_server::FILE_DEFAULT);
    global.config.as_deref().or_else(|| usual.exists().then_some(usual))
}

/// What faults of the configuration begin with.
pub(crate) fn config_name(global: &Global) -> String {
    config_file(global).map_or_else(|| "environment".to_owned(), |path| path.display().to_string())
}

/// Reads the file, if there is one; else the defaults and the sinks in the environment. Also
/// returns warnings.
pub(crate) fn read_config(global: &Global, delivers: bool) -> Result<(Config, Vec<Fault>), LoadError> {
    match config_file(global) {
        Some(path) => Config::load(path, global.store.as_deref(), delivers),
        None => Config::without_file(|name| std::env::var(name).ok(), delivers),
    }
}
