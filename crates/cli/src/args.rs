//! The command line arguments.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use jiff::Timestamp;
use postbox_core::limits::LANES_MAX;
use postbox_core::{
    EventId, IdPrefix, Key, LogName, Rate, ResetTo, Seq, State, SubscriptionName, Tenant, TopicPattern,
};

use crate::commands::migration_files::Tool;
use crate::selectors::{Meant, Selectors};

/// A database commit and the messages about it, as one fact: transactional outbox, verified inbox,
/// event bus.
#[derive(Debug, Parser)]
#[command(name = "postbox", version, propagate_version = true, max_term_width = 100, after_help = AFTER_HELP)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const AFTER_HELP: &str = "Start here: `postbox demo` shows the whole thing in a few seconds and proves that nothing got lost.\n\
Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.";

/// The help heading of options that every command accepts.
const EVERYWHERE: &str = "Everywhere";

#[derive(Debug, clap::Args)]
pub(crate) struct Global {
    /// The configuration [default: postbox.toml if it is there]
    #[arg(long, global = true, help_heading = EVERYWHERE, hide_env_values = true, env = "POSTBOX_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The store, instead of the configured one: postgres://…, sqlite:PATH or memory:; or which of
    /// the configured [stores.NAME]
    #[arg(long, global = true, help_heading = EVERYWHERE, hide_env_values = true, env = "POSTBOX_STORE", value_name = "URL|NAME")]
    pub(crate) store: Option<String>,
    /// Only this subscription [default: all]
    #[arg(long = "subscription", global = true, help_heading = EVERYWHERE, hide_env_values = true, value_name = "NAME", value_parser = plain::<SubscriptionName>)]
    pub(crate) only: Option<SubscriptionName>,
    /// Only this log and what reads it, e.g. inbox [default: all; of send and tail: outbox]
    #[arg(long = "log", global = true, help_heading = EVERYWHERE, hide_env_values = true, value_name = "LOG", value_parser = plain::<LogName>)]
    pub(crate) log: Option<LogName>,
    /// What it says on standard output, as JSON
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    pub(crate) json: bool,
    /// What to log, on standard error: error, warn, info, debug, trace, or a filter
    #[arg(long, global = true, help_heading = EVERYWHERE, hide_env_values = true, env = "POSTBOX_LOG", value_name = "LEVEL")]
    pub(crate) log_level: Option<String>,
    /// Log JSON lines
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    pub(crate) log_json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Watch the whole thing work on embedded SQLite, with a proof at the end
    Demo(crate::commands::demo::DemoArgs),
    /// Write a commented postbox.toml
    Init {
        /// Overwrite the file if it is there
        #[arg(long)]
        force: bool,
    },
    /// Write a program to begin with
    #[command(subcommand)]
    New(New),
    /// Check the configuration; every fault is listed at its line
    CheckConfig {
        /// Also try the store, every sink and every source; nothing is written, no event is sent
        #[arg(long)]
        connect: bool,
    },
    /// Print what can be written in the configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Create, remove, check or print the store's schema
    #[command(subcommand)]
    Migrate(Migrate),
    /// Relay, webhooks in, and the HTTP API, until SIGTERM or Ctrl-C
    Run,
    /// Deliver what is there, then stop; prints fetched=N dispatched=N failed=N dead=N
    Dispatch {
        /// Read at most this many deliveries, so deliver no more; one that has to wait (behind its
        /// key, or for its time) counts too
        #[arg(long, value_name = "N", value_parser = count)]
        limit: Option<usize>,
        /// Go on until nothing is pending, also what waits for its time or to be tried again;
        /// `postbox run` is what runs for ever
        #[arg(long = "loop")]
        until_empty: bool,
    },
    /// Append one event, in a transaction of its own; prints its id
    Send(SendArgs),
    /// Show events as they are appended, from now on, until Ctrl-C
    ///
    /// Each once, whatever else is running: one whose transaction commits late is shown then. What
    /// is shown is committed. Nothing is written, nothing is held up, and nothing shows who looked;
    /// what retention deletes before it was read is not shown.
    Tail {
        /// Only topics like this, e.g. 'order.*'
        #[arg(long, value_name = "PATTERN", value_parser = pattern)]
        topic: Option<TopicPattern>,
        /// Only events of this key
        #[arg(long, value_parser = plain::<Key>)]
        key: Option<Key>,
        /// Only events of this tenant
        #[arg(long, value_parser = plain::<Tenant>)]
        tenant: Option<Tenant>,
    },
    /// Count events; prints pending=N dispatched=N dead=N total=N
    Stats,
    /// List events: the newest first, or those in one state, oldest first; or messages that were
    /// kept out, the latest first
    List {
        /// Only in this state: pending, retrying, blocked, scheduled, dead, discarded, dispatched,
        /// skipped or unrouted; or conflict: came with a known id and another body
        #[arg(long, value_parser = listed)]
        state: Option<Listed>,
        /// At most this many
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=100_000))]
        limit: u64,
        #[command(flatten)]
        which: Selectors,
        /// Only this reason code, e.g. http_500
        #[arg(long)]
        code: Option<String>,
        /// Only events of this conversation: their header correlation-id
        #[arg(long, value_name = "ID")]
        correlation: Option<String>,
    },
    /// Show one event: its fields, its payload, and where it stands in every subscription
    Show {
        /// The event's id, or its first 8 digits at least
        #[arg(value_parser = plain::<IdPrefix>)]
        id: IdPrefix,
    },
    /// Send dead events again, and retrying ones now
    ///
    /// Works in steps of at most 1000 events, so that relays go on meanwhile, and prints retried=N
    /// at the end. Interrupted or failed midway, it prints what was done until then and ends with
    /// 1; the same command goes on with the rest. A limit takes the oldest of all subscriptions
    /// that are meant first.
    #[command(mut_group("which", |which| which.arg("code")))]
    Retry {
        #[command(flatten)]
        meant: Meant,
        /// Only this reason code, e.g. http_500
        #[arg(long, conflicts_with = "ids")]
        code: Option<String>,
    },
    /// Send events again that went out or were skipped, to one subscription, beside what is new
    ///
    /// Without an id: of the events that the subscription wants now, those between two times or
    /// places; an event that is named is sent whether it is wanted or not. What is appended
    /// meanwhile is not meant. Each gets a fresh dedupe id. Works in steps of at most 1000 events
    /// and prints replayed=N at the end; interrupted, it says where to go on.
    #[command(mut_group("which", |which| which.arg("after")))]
    Replay {
        #[command(flatten)]
        meant: Meant,
        /// After this place in the log
        #[arg(long, value_name = "SEQ", conflicts_with = "ids")]
        after: Option<i64>,
        /// Up to this place in the log
        #[arg(long, value_name = "SEQ", conflicts_with = "ids")]
        through: Option<i64>,
        /// No faster than this, e.g. 100/s
        #[arg(long, value_parser = plain::<Rate>)]
        rate: Option<Rate>,
    },
    /// Take events out: they will not be delivered
    ///
    /// Without an id: of those that are retrying, blocked, scheduled or dead; one that nobody has
    /// read yet is taken out by its id only. Works in steps of at most 1000 events and prints
    /// discarded=N at the end, also when it is interrupted or fails midway (then it ends with 1,
    /// and the same command goes on with the rest).
    #[command(mut_group("which", |which| which.arg("code")))]
    Discard {
        #[command(flatten)]
        meant: Meant,
        /// Only this reason code, e.g. http_500
        #[arg(long, conflicts_with = "ids")]
        code: Option<String>,
    },
    /// Give events up as dead: no attempt more, until somebody retries them
    ///
    /// For what will never go through. Without an id: of those that are retrying or blocked; one
    /// that nobody has read yet is marked by its id only. They stay among the dead
    /// (code marked_dead), go to dead_to, and let their keys go on, unless on_dead is "halt". Works
    /// in steps of at most 1000 events and prints marked_dead=N at the end, also when it is
    /// interrupted or fails midway (then it ends with 1, and the same command goes on with the
    /// rest).
    #[command(mut_group("which", |which| which.arg("code")))]
    MarkDead {
        #[command(flatten)]
        meant: Meant,
        /// Only this reason code, e.g. http_500
        #[arg(long, conflicts_with = "ids")]
        code: Option<String>,
        /// Why, for whoever wonders later: it begins their error
        #[arg(long)]
        why: Option<String>,
    },
    /// Delete old dispatched and skipped events of every log that has a subscription; pending, dead
    /// and unrouted ones stay
    #[command(group = clap::ArgGroup::new("age").required(true).args(["older_than", "until"]))]
    Prune {
        #[command(flatten)]
        which: Selectors,
        /// Events that no subscription wants, which are kept otherwise, and no others
        #[arg(long)]
        unrouted: bool,
        /// Of those that were discarded, only those with this reason code, and nothing else
        #[arg(long, conflicts_with = "unrouted")]
        code: Option<String>,
        /// At most this many, log by log, oldest first
        #[arg(long, value_name = "N", value_parser = count)]
        limit: Option<usize>,
        /// Only count them: delete nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Stop delivering for a subscription until it is resumed
    Pause {
        /// Which subscription
        #[arg(value_name = "SUBSCRIPTION", value_parser = plain::<SubscriptionName>)]
        name: SubscriptionName,
        /// Why, for whoever wonders later
        #[arg(long, default_value = "asked for on the command line")]
        why: String,
        /// Resume by itself after this time, e.g. 30m
        #[arg(long = "for", value_name = "TIME", value_parser = duration)]
        span: Option<Duration>,
    },
    /// Deliver again for a paused subscription
    Resume {
        /// Which subscription
        #[arg(value_name = "SUBSCRIPTION", value_parser = plain::<SubscriptionName>)]
        name: SubscriptionName,
    },
    /// List, show, rename, reset or remove subscriptions, or change their lanes
    #[command(subcommand)]
    Subscription(SubscriptionCommand),
    /// Say why something is late
    Doctor,
    /// Print shell completions, e.g. postbox completions bash > /etc/bash_completion.d/postbox
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct SendArgs {
    /// What happened, e.g. order.paid
    pub(crate) topic: String,
    /// The payload; @FILE reads it from a file, - from standard input
    #[arg(default_value = "-")]
    pub(crate) payload: String,
    /// Events of one key are delivered in their order
    #[arg(long)]
    pub(crate) key: Option<String>,
    /// The tenant it belongs to
    #[arg(long)]
    pub(crate) tenant: Option<String>,
    /// A header, as often as you like
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    pub(crate) headers: Vec<(String, String)>,
    /// What the payload is
    #[arg(long, value_name = "TYPE", default_value = "application/json")]
    pub(crate) content_type: String,
    /// Not delivered any more after this time, e.g. 15m
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) expires_in: Option<Duration>,
    /// Its id: where the log has this very event already, it is not appended again
    #[arg(long, value_parser = plain::<EventId>)]
    pub(crate) id: Option<EventId>,
    /// Makes its id, always the same of one key: it names this event, e.g. order-42-paid
    #[arg(long, value_name = "KEY", conflicts_with = "id")]
    pub(crate) idempotency_key: Option<String>,
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write a header as NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

#[derive(Debug, Subcommand)]
pub(crate) enum New {
    /// A small service in Rust: axum, sqlx and Postbox on Postgres, with a test and a Dockerfile
    Service {
        /// Its name, and the folder it goes to
        #[arg(value_parser = crate::commands::new::crate_name)]
        name: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print the JSON Schema of postbox.toml, for editors
    Schema,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SubscriptionCommand {
    /// List the subscriptions in the store
    List,
    /// Show one: what it reads, who drives its lanes, its counts
    Show {
        /// Which subscription
        #[arg(value_parser = plain::<SubscriptionName>)]
        name: SubscriptionName,
    },
    /// Give it another name; its place, its dead events and its pause stay
    ///
    /// A relay of the former name ends. Write the new name into the configuration and start again.
    Rename {
        /// Which subscription
        #[arg(value_parser = plain::<SubscriptionName>)]
        name: SubscriptionName,
        /// Its new name
        #[arg(value_parser = plain::<SubscriptionName>)]
        to: SubscriptionName,
    },
    /// Let it go on from another place: what was delivered since goes out again, what lies before
    /// is skipped
    ///
    /// Says how many events that are; does it with --yes only. While a relay drives it, pause it
    /// first. What goes out again has a fresh dedupe id.
    Reset {
        /// Which subscription
        #[arg(value_parser = plain::<SubscriptionName>)]
        name: SubscriptionName,
        /// now, beginning, a time (2026-01-31T12:00:00Z, or 2h for two hours ago), or the place of
        /// the first event
        #[arg(long, value_name = "now|beginning|TIME|SEQ", value_parser = reset_to)]
        to: ResetTo,
        /// Yes, do it
        #[arg(long)]
        yes: bool,
    },
    /// Take it out, with its place and its dead events; what only it had to deliver may be pruned
    ///
    /// Says how many events that are; does it with --yes only. A relay that drives it ends. Take it
    /// out of the configuration too, or the next start makes it anew.
    Remove {
        /// Which subscription
        #[arg(value_parser = plain::<SubscriptionName>)]
        name: SubscriptionName,
        /// Yes, remove it
        #[arg(long)]
        yes: bool,
    },
    /// Change how many replicas can work for it at once, also while they run
    ///
    /// Delivery rests for a lease (10 s by default). Events that were in flight may arrive again.
    Lanes {
        /// Which subscription
        #[arg(value_parser = plain::<SubscriptionName>)]
        name: SubscriptionName,
        /// How many lanes
        #[arg(value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(LANES_MAX)))]
        lanes: u16,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Migrate {
    /// Bring the schema to this program's version
    Up,
    /// Remove everything Postbox made, events included
    Down {
        /// Yes, remove everything; refused while events are not delivered
        #[arg(long)]
        yes: bool,
        /// Even where events are not delivered: throw them away
        #[arg(long)]
        discard_events: bool,
    },
    /// Check that the schema is this program's; changes nothing
    Validate,
    /// Print the schema as SQL, for other tools
    Print {
        /// As a migration of this tool, which runs it in a transaction of its own (Postgres)
        #[arg(long = "for", value_name = "TOOL")]
        tool: Option<Tool>,
        /// Write the files into this folder, over none that is there
        #[arg(long, value_name = "DIR", requires = "tool")]
        out: Option<PathBuf>,
    },
    /// Print the GRANT statements that the roles of your services need, for the owner to run
    /// (Postgres)
    ///
    /// With --all-tenants also the policies that limit every other role to the tenant that its
    /// transaction names.
    #[command(group = clap::ArgGroup::new("whom").required(true).multiple(true).args(["writer", "relay", "reader", "all_tenants"]))]
    Grants {
        /// A role that appends events
        #[arg(long, value_name = "ROLE")]
        writer: Vec<String>,
        /// A role that `postbox run` and changing commands use
        #[arg(long, value_name = "ROLE")]
        relay: Vec<String>,
        /// A role that only looks: stats, list, show, doctor
        #[arg(long, value_name = "ROLE")]
        reader: Vec<String>,
        /// A role that works for every tenant, as the relay does: all others see one
        #[arg(long, value_name = "ROLE")]
        all_tenants: Vec<String>,
    },
    /// After a dump was restored into another Postgres cluster: put cursors and rows right (stop
    /// every relay first)
    Rebase,
}

/// Parses a value; the error is its text without the operation, which would only say "parse" or
/// "validate".
pub(crate) fn plain<T: std::str::FromStr<Err = postbox_core::Error>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: postbox_core::Error| error.message().to_owned())
}

/// What `list` can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Listed {
    /// Events in this state.
    Events(State),
    /// Rejected messages: a known id with another body. They were never stored as events.
    Conflicts,
}

impl Listed {
    /// The state to list, if events are listed.
    pub(crate) fn state(self) -> Option<State> {
        match self {
            Self::Events(state) => Some(state),
            Self::Conflicts => None,
        }
    }
}

fn listed(text: &str) -> Result<Listed, String> {
    if text == "conflict" {
        return Ok(Listed::Conflicts);
    }
    plain(text).map(Listed::Events).map_err(|error| format!("{error}, or conflict"))
}

pub(crate) fn pattern(text: &str) -> Result<TopicPattern, String> {
    TopicPattern::new(text).map_err(|error| error.message().to_owned())
}

/// A time, or an age.
pub(crate) fn time(text: &str) -> Result<Timestamp, String> {
    let ago = |age: Duration| Timestamp::now().checked_sub(age).map_err(|error| error.to_string());
    match (text.parse(), postbox_server::parse_duration(text)) {
        (Ok(time), _) => Ok(time),
        (_, Ok(age)) => ago(age),
        _ => Err("write a time as 2026-01-31T12:00:00Z, or an age as 30m, 2h, 7d".to_owned()),
    }
}

/// Where a subscription is to continue.
fn reset_to(text: &str) -> Result<ResetTo, String> {
    match (text, text.parse()) {
        ("now", _) => Ok(ResetTo::Now),
        ("beginning", _) => Ok(ResetTo::Beginning),
        (_, Ok(seq)) => Ok(ResetTo::Seq(Seq(seq))),
        _ => time(text).map(ResetTo::Time).map_err(|why| format!("write now, beginning, or a place; or {why}")),
    }
}

pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    postbox_server::parse_duration(text)
}

/// A count of at least one.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("at least 1".to_owned()),
        Ok(count) => Ok(count),
        Err(_) => Err("write a number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_arguments_are_well_formed() {
        Args::command().debug_assert();
    }
}
