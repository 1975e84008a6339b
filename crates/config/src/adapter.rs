//! The contracts of adapters with the server: how they are built from their keys.

use std::any::Any;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Clock, Inbound, Log, LogName, RawMessage, Result, Sink, Source, SourceName, Store, StoreName};
use serde_json::{Value, json};

use crate::document;
use crate::faults::{may_be_secret, suggestion};
use crate::kind::{Kind, Shape, Variant};
use crate::reader::{Place, Section};
use crate::table::{Key, Table};

/// What a sink gets besides its own keys.
#[derive(Clone)]
pub struct SinkContext {
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// The service's own addresses, which a sink never calls.
    pub listening: Vec<SocketAddr>,
    /// Time limit of one call; then the engine drops it.
    pub deliver_timeout: Duration,
    /// Longest time until an event with an unknown outcome is sent again, if everything works: the
    /// expiry of a lease, or the longest retry wait.
    pub repeats_within: Duration,
    /// Most concurrent calls, if the subscription sets it.
    pub concurrency: Option<usize>,
}

/// The configuration of a sink, and its constructor.
#[async_trait]
pub trait SinkConfig: fmt::Debug + Send + Sync + 'static {
    /// Builds the sink. Finds everything that can be wrong, before the first event.
    async fn build(&self, context: &SinkContext) -> Result<Arc<dyn Sink>>;

    /// Whether the event's headers are sent with it. Dead letters need them: their headers say what
    /// they are.
    fn sends_headers(&self) -> bool {
        true
    }

    /// Tries to reach the destination, for a person who asks. Describes what was found, or what is
    /// wrong and the cure. Sends no event and creates nothing.
    ///
    /// The default builds the sink and closes it, which is right if that connects and writes
    /// nothing.
    async fn connect(&self, context: &SinkContext) -> Result<String> {
        self.build(context).await?.close().await;
        Ok("is right".to_owned())
    }
}

/// What a source gets besides its own keys.
#[derive(Clone)]
pub struct SourceContext {
    /// Its name.
    pub name: SourceName,
    /// The clock.
    pub clock: Arc<dyn Clock>,
}

/// The configuration of a pulled source, and its constructor.
#[async_trait]
pub trait SourceConfig: fmt::Debug + Send + Sync + 'static {
    /// The log that it writes to.
    fn log(&self) -> &LogName;
    /// Builds the source. Errors are faults that a person must fix; an unreachable broker is an
    /// error of the source's calls, not of this one.
    async fn build(&self, context: &SourceContext) -> Result<Arc<dyn Source>>;

    /// Returns the event of a message of source `name`; `None` if nothing is to be stored. An error
    /// makes the message poison.
    fn decode(&self, name: &SourceName, message: &RawMessage) -> Result<Option<Inbound>> {
        message.clone().into_inbound(name).map(Some)
    }

    /// Tries to reach the broker, as [`SinkConfig::connect`] does. Takes no message and creates
    /// nothing.
    async fn connect(&self, context: &SourceContext) -> Result<String> {
        self.build(context).await?.close().await;
        Ok("is right".to_owned())
    }
}

/// The options of a store in `[store]`, besides the URL, and its constructor.
#[async_trait]
pub trait StoreOptions: Any + fmt::Debug + Send + Sync {
    /// Checks a URL of this store. The message never repeats it.
    fn check(&self, url: &str) -> Result<(), String>;
    /// Returns what is allowed in the URL but risky.
    fn risk(&self, url: &str) -> Option<&'static str>;
    /// Says in a few words which store it is. Never contains a password.
    fn describe(&self, url: &str) -> String;
    /// Opens the store. Creates nothing: a missing file is created by the migration. If it
    /// `is_one_of_many`, it opens few connections unless its options set a number.
    async fn open(&self, url: &str, is_one_of_many: bool) -> Result<Arc<dyn Store>>;
}

/// The configuration of who, beside the store, says which relay has a lane.
#[async_trait]
pub trait LeaseConfig: fmt::Debug + Send + Sync + 'static {
    /// Who else is asked, by every relay of the process; `None`: the store alone says it.
    fn build(&self) -> Result<Option<Arc<dyn Leases>>>;

    /// Tries to reach it, as [`SinkConfig::connect`] does. Takes no lane.
    async fn connect(&self) -> Result<String>;
}

/// Says beside the store which relay has a lane.
pub trait Leases: Send + Sync + 'static {
    /// The same log, whose lanes are taken there too. `store` names it where there are several.
    fn on(self: Arc<Self>, log: Arc<dyn Log>, store: Option<&StoreName>) -> Arc<dyn Log>;
}

const _: Option<(&dyn SinkConfig, &dyn SourceConfig, &dyn StoreOptions)> = None;
const _: Option<(&dyn LeaseConfig, &dyn Leases)> = None;

/// One row of a constant table of adapters; `C` is the contract of their configurations.
pub struct Adapter<C: ?Sized + 'static> {
    /// Its name: the value of `type`, or the prefix of a store's URLs.
    pub name: &'static str,
    /// An example, as in the file.
    pub example: &'static str,
    doc: fn() -> String,
    /// Its keys.
    pub keys: fn() -> Vec<Key>,
    /// Reads its keys.
    pub read: fn(&Section<'_>) -> Arc<C>,
}

impl<C: ?Sized> Adapter<C> {
    /// Creates the row of an adapter whose keys are `T`.
    pub const fn new<T: Table>(name: &'static str, example: &'static str, read: fn(&Section<'_>) -> Arc<C>) -> Self {
        Self { name, example, doc: T::doc, keys: T::keys, read }
    }
}

/// `{ type = "…", … }`: the name of an adapter and its configuration. `optional` names adapters
/// that may be compiled out.
pub fn adapter<C: ?Sized>(
    what: &'static str,
    rows: &'static [Adapter<C>],
    optional: &'static [&'static str],
) -> Kind<(&'static str, Arc<C>)> {
    let variant =
        |row: &Adapter<C>| Variant { name: row.name, doc: (row.doc)(), keys: (row.keys)(), example: row.example };
    let variants: Vec<Variant> = rows.iter().map(variant).collect();
    let schemas: Vec<Value> = variants.iter().map(document::variant).collect();
    let mut kind = Kind::new(json!({ "oneOf": schemas }), move |place| {
        place.section()?.finish(|section| {
            let row = row(section, what, rows, optional)?;
            Some((row.name, (row.read)(section)))
        })
    });
    kind.shape = Shape { variants, ..kind.shape };
    kind
}

fn row<C: ?Sized>(
    section: &Section<'_>,
    what: &str,
    rows: &'static [Adapter<C>],
    optional: &[&str],
) -> Option<&'static Adapter<C>> {
    let names: Vec<_> = rows.iter().map(|row| row.name).collect();
    let Some(place) = section.place("type") else {
        // The first of those that have the most of the written keys.
        let written = |row: &&Adapter<C>| (row.keys)().iter().filter(|key| section.has(key.name)).count();
        let meant = rows.iter().rev().max_by_key(written).map_or(names[0], |row| row.name);
        section.fault("type", format!("{} has no type; write type = {meant:?}", section.path));
        return None;
    };
    let word = place.text()?;
    rows.iter().find(|row| row.name == word).or_else(|| refuse(&place, what, word, &names, optional))
}

fn refuse<T>(place: &Place<'_>, what: &str, word: &str, names: &[&str], optional: &[&str]) -> Option<T> {
    let name = &place.name;
    place.fault(if optional.contains(&word) {
        format!(
            "{name}: this program was built without {word:?}; build it with --features full, or use {}",
            names.join(", ")
        )
    } else {
        let shown = if may_be_secret(word) { "what is written there".to_owned() } else { format!("{word:?}") };
        format!("{name}: {shown} is no {what}; {}", suggestion(word, names))
    })
}
