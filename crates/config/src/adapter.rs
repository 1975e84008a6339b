//! What an adapter hands to the server beside its keys: how it is built from them.

use std::any::Any;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Clock, Inbound, LogName, RawMessage, Result, Sink, Source, SourceName, Store};
use serde_json::{Value, json};

use crate::document;
use crate::faults::{may_be_secret, suggestion};
use crate::kind::{Kind, Shape, Variant};
use crate::reader::{Place, Section};
use crate::table::{Key, Table};

/// What a sink is built with beside its own keys.
#[derive(Clone)]
pub struct SinkContext {
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// Where the service listens: a sink never calls that.
    pub listening: Vec<SocketAddr>,
    /// Longest time for one call, after which the engine drops it.
    pub deliver_timeout: Duration,
    /// The longest time until an event whose outcome is unknown is sent again, while everything
    /// works: a lease that runs out, or the longest wait before a retry.
    pub repeats_within: Duration,
    /// Most calls at once, where the subscription says so.
    pub concurrency: Option<usize>,
}

/// The configuration of a sink, which builds it.
#[async_trait]
pub trait SinkConfig: fmt::Debug + Send + Sync + 'static {
    /// Builds the sink. Everything that can be wrong is found here, before the first event.
    async fn build(&self, context: &SinkContext) -> Result<Arc<dyn Sink>>;

    /// Whether the event's headers go out with it. A dead letter says in its headers what it is.
    fn sends_headers(&self) -> bool {
        true
    }

    /// Tries to reach the destination, for a person who asks; says what was found, or what is wrong
    /// and how to mend it. Sends no event and makes nothing.
    ///
    /// As it stands it builds the sink and closes it: right where that connects and writes nothing.
    async fn connect(&self, context: &SinkContext) -> Result<String> {
        self.build(context).await?.close().await;
        Ok("is right".to_owned())
    }
}

/// What a source is built with beside its own keys.
#[derive(Clone)]
pub struct SourceContext {
    /// Its name.
    pub name: SourceName,
    /// The time.
    pub clock: Arc<dyn Clock>,
}

/// The configuration of a source that is asked for its messages, which builds it.
#[async_trait]
pub trait SourceConfig: fmt::Debug + Send + Sync + 'static {
    /// The log it stores into.
    fn log(&self) -> &LogName;
    /// Builds the source. What a person must mend is found here; a broker that cannot be reached
    /// is an error of the source's calls, not of this one.
    async fn build(&self, context: &SourceContext) -> Result<Arc<dyn Source>>;

    /// The event of a message of source `name`; `None` if nothing of it is to be stored. An error
    /// makes it poison.
    fn decode(&self, name: &SourceName, message: &RawMessage) -> Result<Option<Inbound>> {
        message.clone().into_inbound(name).map(Some)
    }

    /// Tries to reach the broker, as [`SinkConfig::connect`] does. Takes no message and makes
    /// nothing.
    async fn connect(&self, context: &SourceContext) -> Result<String> {
        self.build(context).await?.close().await;
        Ok("is right".to_owned())
    }
}

/// What a store has in `[store]` beside the URL, and what it makes of that.
#[async_trait]
pub trait StoreOptions: Any + fmt::Debug + Send + Sync {
    /// Checks a URL of its own; the message never repeats it.
    fn check(&self, url: &str) -> Result<(), String>;
    /// What is allowed in the URL and still a risk.
    fn risk(&self, url: &str) -> Option<&'static str>;
    /// Opens the store. Makes nothing: a file that is not there is made by the migration. Where it
    /// `is_one_of_many` in the program, it takes few connections unless its options say how many.
    async fn open(&self, url: &str, is_one_of_many: bool) -> Result<Arc<dyn Store>>;
}

const _: Option<(&dyn SinkConfig, &dyn SourceConfig, &dyn StoreOptions)> = None;

/// One row of a constant table of adapters; `C` is the contract of their configurations.
pub struct Adapter<C: ?Sized + 'static> {
    /// What names it: the word after `type =`, or what a store's URL begins with.
    pub name: &'static str,
    /// An example as in the file.
    pub example: &'static str,
    doc: fn() -> String,
    /// Its keys.
    pub keys: fn() -> Vec<Key>,
    /// Reads them.
    pub read: fn(&Section<'_>) -> Arc<C>,
}

impl<C: ?Sized> Adapter<C> {
    /// The row of an adapter whose keys are `T`.
    pub const fn new<T: Table>(name: &'static str, example: &'static str, read: fn(&Section<'_>) -> Arc<C>) -> Self {
        Self { name, example, doc: T::doc, keys: T::keys, read }
    }
}

/// `{ type = "…", … }`: the name of an adapter and its configuration. `optional` are names of
/// adapters that a program may be built without.
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
        section.fault("type", format!("{} has no type; write type = {:?}", section.path, names[0]));
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
