//! The command line arguments.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use jiff::Timestamp;
use postbox_core::limits::LANES_MAX;
use postbox_core::{
    EventId, IdPrefix, Key, LogName, Rate, ResetTo, Seq, State, SubscriptionName, Tenant, TopicPattern,
};

use crate::commands::migration_files::Tool;
use crate::failure::Failure;
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
const EVERYWHERE: &str = "Global options";

#[derive(Debug, clap::Args)]
pub(crate) struct Global {
    /// The configuration file [default: postbox.toml, if it exists] [env: POSTBOX_CONFIG]
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The store to use instead of the configured one: postgres://…, sqlite:PATH or, to try `run`,
    /// memory:; or the NAME of one of the configured [stores.NAME] [env: POSTBOX_STORE]
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "URL|NAME")]
    pub(crate) store: Option<String>,
    /// Whether `store` is the value of the variable.
    #[arg(skip)]
    pub(crate) is_store_of_environment: bool,
    /// Only this subscription [default: all]
    #[arg(long = "subscription", global = true, help_heading = EVERYWHERE, value_name = "NAME", value_parser = plain::<SubscriptionName>)]
    pub(crate) only: Option<SubscriptionName>,
    /// Only this log and its subscriptions, e.g. inbox [default: all; for send and tail: outbox]
    #[arg(long = "log", global = true, help_heading = EVERYWHERE, value_name = "LOG", value_parser = plain::<LogName>)]
    pub(crate) log: Option<LogName>,
    /// Print the result as JSON
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    pub(crate) json: bool,
    /// The log level, on standard error: error, warn, info, debug, trace, or a filter
    /// [env: POSTBOX_LOG]
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "LEVEL")]
    pub(crate) log_level: Option<String>,
    /// Log JSON lines
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    pub(crate) log_json: bool,
}

impl Global {
    /// Takes what was not given from the environment; an empty variable is not set. The parser
    /// would show a variable as a part of the command line in every usage error.
    pub(crate) fn or_environment(
        &mut self,
        variable: impl Fn(&'static str) -> Option<OsString>,
    ) -> Result<(), Failure> {
        let set = |name| variable(name).filter(|value| !value.is_empty());
        // With other characters in place of those, a path would name another file.
        let refused = |name: &str| Failure::usage(format!("{name} is not UTF-8; set it to text in UTF-8, or unset it"));
        let text = |name| set(name).map(|value| value.into_string().map_err(|_| refused(name))).transpose();
        self.config = self.config.take().or_else(|| set("POSTBOX_CONFIG").map(PathBuf::from));
        if self.store.is_none() {
            self.store = text(postbox_server::STORE_VARIABLE)?;
            self.is_store_of_environment = self.store.is_some();
        }
        if self.log_level.is_none() {
            self.log_level = text("POSTBOX_LOG")?;
        }
        Ok(())
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Watch the whole thing work on embedded SQLite, with a proof at the end
    Demo(crate::commands::demo::DemoArgs),
    /// Write a commented postbox.toml
    Init {
        /// Overwrite an existing file
        #[arg(long)]
        force: bool,
    },
    /// Create a new project to start from
    #[command(subcommand)]
    New(New),
    /// Check the configuration; lists every fault with its line
    CheckConfig {
        /// Also try the store, every sink and every source; nothing is written, no event is sent
        #[arg(long)]
        connect: bool,
    },
    /// Print the JSON Schema of the configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Create, remove, check or print the store's schema
    #[command(subcommand)]
    Migrate(Migrate),
    /// Run the service: relays, sources and the HTTP server, until SIGTERM or Ctrl-C
    ///
    /// It also stops, with exit code 0, at SIGHUP, which a terminal sends when it is closed, unless
    /// it was started with SIGHUP ignored, as by `nohup`.
    Run,
    /// Deliver what is pending, then stop; prints fetched=N dispatched=N failed=N dead=N
    Dispatch {
        /// Read at most this many deliveries; one that has to wait (behind its key, or for its
        /// time) counts too
        #[arg(long, value_name = "N", value_parser = count)]
        limit: Option<usize>,
        /// Continue until nothing is pending, and wait for retries and scheduled events; to run for
        /// ever, use `postbox run`
        #[arg(long = "loop")]
        until_empty: bool,
    },
    /// Append one event, in a transaction of its own; prints its id
    Send(SendArgs),
    /// Show events as they are appended, from now on, until Ctrl-C
    ///
    /// Each committed event is shown once, also if its transaction commits late. Nothing is written
    /// and nothing is delayed. Events that retention deletes before they are read are not shown.
    Tail {
        /// Only topics that match this pattern, e.g. 'order.*'
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
    /// List events: newest first, or those in one state, oldest first; or rejected messages, latest
    /// first
    List {
        /// Only in this state: pending, retrying, blocked, scheduled, dead, discarded, dispatched,
        /// skipped or unrouted; or conflict: messages rejected for a known id with another body
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
        /// Only events with this correlation-id header; its name is matched exactly, in lower case
        #[arg(long, value_name = "ID")]
        correlation: Option<String>,
        /// Only events with this causation-id header (matched likewise): what an event caused
        #[arg(long, value_name = "ID")]
        causation: Option<String>,
    },
    /// Show one event: its fields, its payload, and its state in every subscription
    Show {
        /// The event's id, or at least its first 8 digits
        #[arg(value_parser = plain::<IdPrefix>)]
        id: IdPrefix,
    },
    /// Retry dead events, and retrying ones now
    ///
    /// Works in steps of at most 1000 events, so that relays can work in between, and prints
    /// retried=N at the end. If it is interrupted or fails, it prints what was done until then and
    /// exits with 1; the same command continues with the rest, with the --limit that it prints.
    /// With --limit, the oldest events of all selected subscriptions come first.
    #[command(mut_group("which", |which| which.arg("code")))]
    Retry {
        #[command(flatten)]
        meant: Meant,
        /// Only this reason code, e.g. http_500
        #[arg(long, conflicts_with = "ids")]
        code: Option<String>,
    },
    /// Send delivered or skipped events again to one subscription, together with new events
    ///
    /// Without an id: the events between two times or places that the subscription wants now. An
    /// event that is named is sent whether it is wanted or not. Events appended during the replay
    /// are not included. Each event gets a new dedupe id. Works in steps of at most 1000 events and
    /// prints replayed=N at the end; if it is interrupted, it says where to continue, and
    /// with which --limit.
    #[command(mut_group("which", |which| which.args(["after", "through"])))]
    Replay {
        #[command(flatten)]
        meant: Meant,
        /// Only events after this seq
        #[arg(long, value_name = "SEQ", conflicts_with = "ids")]
        after: Option<i64>,
        /// Only events up to this seq
        #[arg(long, value_name = "SEQ", conflicts_with = "ids")]
        through: Option<i64>,
        /// No faster than this, e.g. 100/s
        #[arg(long, value_parser = plain::<Rate>)]
        rate: Option<Rate>,
    },
    /// Discard events: they will not be delivered
    ///
    /// Without an id: events that are retrying, blocked, scheduled or dead. An event that was not
    /// read yet can only be discarded by its id. Works in steps of at most 1000 events and prints
    /// discarded=N at the end, also if it is interrupted or fails (then it exits with 1, and the
    /// same command continues with the rest, with the --limit that it prints).
    #[command(mut_group("which", |which| which.arg("code")))]
    Discard {
        #[command(flatten)]
        meant: Meant,
        /// Only this reason code, e.g. http_500
        #[arg(long, conflicts_with = "ids")]
        code: Option<String>,
    },
    /// Mark events dead: no further attempt, until somebody retries them
    ///
    /// For events that can never be delivered. Without an id: events that are retrying or blocked.
    /// An event that was not read yet can only be marked by its id. The events are kept as dead
    /// (code marked_dead) and sent to dead_to; their keys continue, unless on_dead is "halt". Works
    /// in steps of at most 1000 events and prints marked_dead=N at the end, also if it is
    /// interrupted or fails (then it exits with 1, and the same command continues with the rest,
    /// with the --limit that it prints).
    #[command(mut_group("which", |which| which.arg("code")))]
    MarkDead {
        #[command(flatten)]
        meant: Meant,
        /// Only this reason code, e.g. http_500
        #[arg(long, conflicts_with = "ids")]
        code: Option<String>,
        /// The reason, shown with the event
        #[arg(long)]
        why: Option<String>,
    },
    /// Delete old dispatched and skipped events of every log that has a subscription; pending, dead
    /// and unrouted ones stay
    ///
    /// Works in small steps and prints pruned=N at the end, also if it is interrupted or fails
    /// (then it exits with 1, and the same command continues with the rest, with the --limit that
    /// it prints).
    #[command(group = clap::ArgGroup::new("age").required(true).args(["older_than", "until"]))]
    Prune {
        #[command(flatten)]
        which: Selectors,
        /// Only events that no subscription wants, which are kept otherwise
        #[arg(long)]
        unrouted: bool,
        /// Only discarded events with this reason code
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
        /// The reason, shown with the pause
        #[arg(long, default_value = "asked for on the command line")]
        why: String,
        /// Resume automatically after this time, e.g. 30m
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
    /// Explain why events are late, and what to do
    Doctor,
    /// Print shell completions, e.g. postbox completions bash > /etc/bash_completion.d/postbox
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct SendArgs {
    /// The topic: what happened, e.g. order.paid
    pub(crate) topic: String,
    /// The payload; @FILE reads it from a file, - from standard input
    #[arg(default_value = "-")]
    pub(crate) payload: String,
    /// The key: events of one key are delivered in order
    #[arg(long)]
    pub(crate) key: Option<String>,
    /// The tenant it belongs to
    #[arg(long)]
    pub(crate) tenant: Option<String>,
    /// A header; may be repeated
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    pub(crate) headers: Vec<(String, String)>,
    /// The payload's content type
    #[arg(long, value_name = "TYPE", default_value = "application/json")]
    pub(crate) content_type: String,
    /// Do not deliver the event after this time, e.g. 15m
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) expires_in: Option<Duration>,
    /// The event's id; if the log already has this event, it is not appended again
    #[arg(long, value_parser = plain::<EventId>)]
    pub(crate) id: Option<EventId>,
    /// Derives the id from this key, e.g. order-42-paid; the same key gives the same id
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
        /// Its name, and the folder to create
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
    /// Rename it; its position, its dead events and its pause stay
    ///
    /// Relays of the old name stop. Change the name in the configuration too, and restart.
    Rename {
        /// Which subscription
        #[arg(value_parser = plain::<SubscriptionName>)]
        name: SubscriptionName,
        /// Its new name
        #[arg(value_parser = plain::<SubscriptionName>)]
        to: SubscriptionName,
    },
    /// Continue from another place: later events are delivered again, earlier ones are skipped
    ///
    /// Prints how many events that are; changes something only with --yes. If a relay drives it,
    /// pause it first. Events that are delivered again get a new dedupe id.
    Reset {
        /// Which subscription
        #[arg(value_parser = plain::<SubscriptionName>)]
        name: SubscriptionName,
        /// now, beginning, a time (2026-01-31T12:00:00Z, or 2h for two hours ago), or the seq of
        /// the first event (see postbox show)
        #[arg(long, value_name = "now|beginning|TIME|SEQ", value_parser = reset_to)]
        to: ResetTo,
        /// Do it
        #[arg(long)]
        yes: bool,
    },
    /// Remove it, with its position and its dead events; events that only it wanted may then be
    /// pruned
    ///
    /// Prints how many events that are; removes it only with --yes. Relays that drive it stop.
    /// Remove it from the configuration too, or the next start creates it again.
    Remove {
        /// Which subscription
        #[arg(value_parser = plain::<SubscriptionName>)]
        name: SubscriptionName,
        /// Remove it
        #[arg(long)]
        yes: bool,
    },
    /// Change how many replicas can work on it at once, also while they run
    ///
    /// Delivery stops for one lease (10 s by default). Events that were in flight may arrive again.
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
    /// Bring the schema to this program's version; with --log NAME, also create that log
    Up,
    /// Remove everything Postbox created, events included
    Down {
        /// Remove everything; refused while events are undelivered, dead or unrouted
        #[arg(long)]
        yes: bool,
        /// Also throw away events that are undelivered, dead or unrouted
        #[arg(long)]
        discard_events: bool,
    },
    /// Check that the schema fits this program; changes nothing
    Validate,
    /// Print the schema as SQL, for other tools
    Print {
        /// As a migration for this tool, which runs it in a transaction of its own (Postgres)
        #[arg(long = "for", value_name = "TOOL")]
        tool: Option<Tool>,
        /// Write the files into this folder; existing files are not overwritten
        #[arg(long, value_name = "DIR", requires = "tool")]
        out: Option<PathBuf>,
    },
    /// Print the GRANT statements that the roles of your services need, for the owner to run
    /// (Postgres)
    ///
    /// With --all-tenants also the policies that limit every other role to the tenant named by its
    /// transaction.
    #[command(group = clap::ArgGroup::new("whom").required(true).multiple(true).args(["writer", "relay", "reader", "all_tenants"]))]
    Grants {
        /// A role that appends events
        #[arg(long, value_name = "ROLE")]
        writer: Vec<String>,
        /// A role that `postbox run` and changing commands use
        #[arg(long, value_name = "ROLE")]
        relay: Vec<String>,
        /// A role that only reads: stats, list, show, doctor
        #[arg(long, value_name = "ROLE")]
        reader: Vec<String>,
        /// A role that works for all tenants, as the relay does; every other role sees one tenant
        #[arg(long, value_name = "ROLE")]
        all_tenants: Vec<String>,
    },
    /// Correct cursors and rows after a dump was restored into another Postgres cluster (stop every
    /// relay first)
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
        _ => time(text)
            .map(ResetTo::Time)
            .map_err(|why| format!("write now, beginning, or a seq (a number, see postbox show); or {why}")),
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

    #[test]
    fn an_argument_precedes_its_variable_and_an_empty_variable_is_not_set() {
        let of = |args: &[&str], value: &str| {
            let mut args = Args::try_parse_from([&["postbox", "stats"], args].concat()).expect("arguments");
            args.global.or_environment(|_| Some(value.into())).expect("UTF-8");
            (args.global.store, args.global.config, args.global.log_level)
        };
        assert_eq!(of(&[], ""), (None, None, None));
        assert_eq!(of(&[], "debug"), (Some("debug".into()), Some("debug".into()), Some("debug".into())));
        assert_eq!(of(&["--store", "memory:"], "x").0.as_deref(), Some("memory:"));
    }

    #[cfg(unix)]
    #[test]
    fn a_variable_that_is_not_utf_8_is_refused_by_its_name() {
        use std::os::unix::ffi::OsStringExt as _;
        for name in [postbox_server::STORE_VARIABLE, "POSTBOX_LOG"] {
            let mut args = Args::try_parse_from(["postbox", "stats"]).expect("arguments");
            let set = |it: &'static str| (it == name).then(|| OsString::from_vec(b"sqlite:\xff.db".to_vec()));
            let refused = args.global.or_environment(set).expect_err("refused");
            assert!(matches!(&refused, Failure::Usage(text) if text.starts_with(name)), "{refused:?}");
        }
    }
}
