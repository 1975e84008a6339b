//! One file per command.

use jiff::Timestamp;
use postbox_core::{Change, Criteria, EventId, IdPrefix, Prune, Replay, Selection, Seq, header};
use postbox_server::Roles;

use crate::args::{Args, Command, ConfigCommand, Listed, Migrate, New, SubscriptionCommand};
use crate::context::{Context, Purpose, load, require_store};
use crate::failure::Failure;
use crate::selectors::{Chosen, Meant};

mod check_config;
mod completions;
mod config;
mod conflicts;
pub(crate) mod demo;
mod discard;
mod dispatch;
pub(crate) mod doctor;
mod init;
pub(crate) mod list;
mod migrate;
pub(crate) mod migration_files;
mod named;
pub(crate) mod new;
mod pause;
mod prune;
mod replay;
mod retry;
mod run;
mod send;
pub(crate) mod show;
pub(crate) mod stats;
mod steps;
pub(crate) mod subscription;
pub(crate) mod tail;

/// Runs the command.
pub(crate) async fn run(args: Args) -> Result<(), Failure> {
    let (global, json) = (&args.global, args.global.json);
    let is_printer = args.command.is_printer();
    if json && (is_printer || matches!(args.command, Command::Run)) {
        return Err(Failure::usage("this command has no JSON output; leave --json out"));
    }
    if !is_printer && !matches!(args.command, Command::CheckConfig { .. }) {
        require_store(global)?;
    }
    let inspect = || Context::load(global, Purpose::Inspect);
    let inspect_each = || Context::load_each(global, Purpose::Inspect);
    match args.command {
        Command::Demo(demo) => demo::run(demo).await,
        Command::Init { force } => init::run(global, force),
        Command::New(New::Service { name }) => new::service(&name),
        Command::CheckConfig { connect } => check_config::run(global, connect).await,
        Command::Config(ConfigCommand::Schema) => {
            config::schema();
            Ok(())
        }
        Command::Completions { shell } => {
            completions::run(shell);
            Ok(())
        }
        Command::Migrate(Migrate::Down { .. } | Migrate::Validate | Migrate::Rebase)
            if global.only.is_some() || global.log.is_some() =>
        {
            Err(Failure::usage("it concerns everything in the store; leave --subscription and --log out"))
        }
        Command::Prune { .. } if global.only.is_some() => {
            Err(Failure::usage("events belong to a log, not to a subscription; name their log with --log"))
        }
        Command::Migrate(Migrate::Up) => migrate::up(&inspect_each()?, json).await,
        Command::Migrate(Migrate::Down { yes, discard_events }) => {
            migrate::down(&inspect()?, yes, discard_events, json).await
        }
        Command::Migrate(Migrate::Validate) => migrate::validate(&inspect_each()?, json).await,
        Command::Migrate(Migrate::Print { tool: None, .. }) => migrate::print(&inspect()?).await,
        Command::Migrate(Migrate::Print { tool: Some(tool), out }) => {
            migration_files::run(&inspect()?, tool, out.as_deref())
        }
        Command::Migrate(Migrate::Grants { writer: writers, relay: relays, reader: readers, all_tenants }) => {
            migrate::grants(&inspect()?, &Roles { writers, relays, readers, all_tenants }).await
        }
        Command::Migrate(Migrate::Rebase) => migrate::rebase(&inspect()?, json).await,
        Command::Run if global.only.is_some() || global.log.is_some() => Err(Failure::usage(
            "run serves the whole configuration; leave --subscription and --log out (dispatch accepts them)",
        )),
        Command::Run => run::run(load(global, Purpose::Serve)?.0).await,
        Command::Dispatch { limit, until_empty } => {
            dispatch::run(&Context::load_each(global, Purpose::Deliver)?, limit, until_empty, json).await
        }
        Command::Stats => stats::run(&inspect_each()?, json).await,
        Command::List {
            state: Some(Listed::Conflicts),
            limit,
            which,
            code: None,
            correlation: None,
            causation: None,
        } if which.are_none() => conflicts::list(&inspect_each()?, limit as usize, json).await,
        Command::List { state: Some(Listed::Conflicts), .. } => Err(Failure::usage(
            "conflicts have no topic, key, time, code or header to select by; leave all but --limit and --json out",
        )),
        Command::List { state, limit, which, code, correlation, causation } => {
            let state = state.and_then(Listed::state);
            // There may be several stores, each with a clock of its own.
            let which = which.criteria(async || Ok(Timestamp::now())).await?;
            let headers = [(header::CORRELATION_ID, correlation), (header::CAUSATION_ID, causation)].into_iter();
            let headers = headers.filter_map(|(name, id)| Some((name.to_owned(), id?))).collect();
            let wanted = list::Wanted { state, limit: limit as usize, which, code, headers };
            list::run(&inspect_each()?, &wanted, json).await
        }
        Command::Show { id } => {
            let context = inspect()?;
            let ids = context.event_ids(&[id]).await?;
            show::run(&context, ids[0], json).await
        }
        Command::Send(send) => send::run(&inspect()?, send, json).await,
        Command::Tail { topic, key, tenant } => {
            let which = Criteria { topic, key, tenant, ..Criteria::default() };
            tail::run(&inspect()?, &which, json).await
        }
        Command::Retry { meant, code } => {
            let context = inspect()?;
            retry::run(&context, selection(&context, meant, code).await?, json).await
        }
        Command::Discard { meant, code } => {
            let context = inspect()?;
            discard::run(&context, &Change::Discard, selection(&context, meant, code).await?, json).await
        }
        Command::MarkDead { meant, code, why } => {
            let context = inspect()?;
            let selection = selection(&context, meant, code).await?;
            discard::run(&context, &Change::MarkDead { why }, selection, json).await
        }
        Command::Replay { after: Some(after), through: Some(through), .. } if after >= through => {
            Err(Failure::usage("no seq is after --after and up to --through; give the larger one to --through"))
        }
        Command::Replay { meant, after, through, rate } => {
            let context = inspect()?;
            let Chosen { ids, which, limit, dry_run } = meant.chosen(&context).await?;
            let ids = known(&context, ids).await?;
            let (after, through) = (after.map(Seq), through.map(Seq));
            let replay = Replay { ids, which, after, through, limit, dry_run };
            replay::run(&context, replay, rate, json).await
        }
        Command::Prune { which, unrouted, code, limit, dry_run } => {
            let (which, age) = which.criteria_and_age()?;
            let older_than = age.unwrap_or_default();
            let prune = Prune { older_than, which, code, unrouted, limit, after: None, dry_run };
            prune::run(&inspect()?, prune, json).await
        }
        Command::Pause { name, why, span } => pause::pause(&inspect()?, &name, why, span, json).await,
        Command::Resume { name } => pause::resume(&inspect()?, &name, json).await,
        Command::Subscription(command) => match command {
            SubscriptionCommand::List => subscription::list(&inspect_each()?, json).await,
            SubscriptionCommand::Show { name } => subscription::show(&inspect()?, &name, json).await,
            SubscriptionCommand::Rename { name, to } => subscription::rename(&inspect()?, &name, &to, json).await,
            SubscriptionCommand::Reset { name, to, yes } => {
                subscription::reset(&inspect()?, &name, to, yes, json).await
            }
            SubscriptionCommand::Remove { name, yes } => subscription::remove(&inspect()?, &name, yes, json).await,
            SubscriptionCommand::Lanes { name, lanes } => subscription::lanes(&inspect()?, &name, lanes, json).await,
        },
        Command::Doctor => doctor::run(&inspect_each()?, json).await,
    }
}

async fn selection(context: &Context, meant: Meant, code: Option<String>) -> Result<Selection, Failure> {
    let Chosen { ids, which, limit, dry_run } = meant.chosen(context).await?;
    let ids = known(context, ids).await?;
    Ok(Selection { ids, which, code, limit, dry_run, ..Selection::default() })
}

async fn known(context: &Context, typed: Option<Vec<IdPrefix>>) -> Result<Option<Vec<EventId>>, Failure> {
    match typed {
        None => Ok(None),
        Some(typed) => context.event_ids(&typed).await.map(Some),
    }
}

impl Command {
    /// Whether it only writes files, SQL, a schema or other text. Such a command needs no store
    /// that somebody has named, and has no result to print as JSON.
    fn is_printer(&self) -> bool {
        matches!(
            self,
            Self::Demo(_)
                | Self::Init { .. }
                | Self::New(_)
                | Self::Config(_)
                | Self::Completions { .. }
                | Self::Migrate(Migrate::Print { .. } | Migrate::Grants { .. })
        )
    }
}
