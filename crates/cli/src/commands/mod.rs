//! One file a command.

use postbox_core::{Replay, Seq};

use crate::args::{Args, Command, ConfigCommand, Listed, Migrate, SubscriptionCommand};
use crate::context::{Context, Purpose};
use crate::failure::Failure;

mod check_config;
mod completions;
mod config;
mod conflicts;
pub(crate) mod demo;
mod discard;
mod dispatch;
mod doctor;
mod init;
mod list;
mod migrate;
mod pause;
mod prune;
mod replay;
mod retry;
mod run;
mod show;
mod stats;
mod steps;
mod subscription;

/// Runs the command that was typed.
pub(crate) async fn run(args: Args) -> Result<(), Failure> {
    let global = &args.global;
    let inspect = || Context::load(global, Purpose::Inspect);
    match args.command {
        Command::Demo(demo) => demo::run(demo).await,
        Command::Init { force } => init::run(global, force),
        Command::CheckConfig { connect } => check_config::run(global, connect).await,
        Command::Config(ConfigCommand::Schema) => config::schema(),
        Command::Completions { shell } => completions::run(shell),
        Command::Migrate(Migrate::Up) => migrate::up(&inspect()?).await,
        Command::Migrate(Migrate::Down { yes, discard_events }) => {
            migrate::down(&inspect()?, yes, discard_events).await
        }
        Command::Migrate(Migrate::Validate) => migrate::validate(&inspect()?).await,
        Command::Migrate(Migrate::Print) => migrate::print(&inspect()?).await,
        Command::Migrate(Migrate::Grants { writer, relay, reader }) => {
            migrate::grants(&inspect()?, writer, relay, reader).await
        }
        Command::Migrate(Migrate::Rebase) => migrate::rebase(&inspect()?).await,
        Command::Run => run::run(Context::load(global, Purpose::Serve)?).await,
        Command::Dispatch { limit, until_empty } => {
            dispatch::run(&Context::load(global, Purpose::Deliver)?, limit, until_empty).await
        }
        Command::Stats { json } => stats::run(&inspect()?, json).await,
        Command::List { state: Listed::Conflicts, limit, topic: None, code: None, json } => {
            conflicts::list(&inspect()?, limit as usize, json).await
        }
        Command::List { state: Listed::Conflicts, .. } => Err(Failure::usage(
            "a conflict has no topic and no code: it never became an event; leave --topic and --code out",
        )),
        Command::List { state: Listed::Events(state), limit, topic, code, json } => {
            list::run(&inspect()?, list::Wanted { state, limit: limit as usize, topic, code }, json).await
        }
        Command::Show { id, json } => show::run(&inspect()?, id, json).await,
        Command::Retry { ids, all, topic, code, limit } => {
            let limit = limit.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX));
            retry::run(&inspect()?, if all { None } else { Some(ids) }, topic, code, limit).await
        }
        Command::Discard { ids } => discard::run(&inspect()?, ids).await,
        Command::Replay { ids, all: _, since, until, after, through, topic, key, limit, rate } => {
            let ids = (!ids.is_empty()).then_some(ids);
            let limit = limit.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX));
            let (after, through) = (after.map(Seq), through.map(Seq));
            let replay = Replay { ids, topic, key, since, until, after, through, limit };
            replay::run(&inspect()?, replay, rate).await
        }
        Command::Prune { older_than, unrouted } => prune::run(&inspect()?, older_than, unrouted).await,
        Command::Pause { name, why, span } => pause::pause(&inspect()?, &name, why, span).await,
        Command::Resume { name } => pause::resume(&inspect()?, &name).await,
        Command::Subscription(command) => {
            let context = inspect()?;
            match command {
                SubscriptionCommand::List { json } => subscription::list(&context, json).await,
                SubscriptionCommand::Show { name, json } => subscription::show(&context, &name, json).await,
                SubscriptionCommand::Rename { name, to } => subscription::rename(&context, &name, &to).await,
                SubscriptionCommand::Reset { name, to, yes } => subscription::reset(&context, &name, to, yes).await,
                SubscriptionCommand::Remove { name, yes } => subscription::remove(&context, &name, yes).await,
                SubscriptionCommand::Lanes { name, lanes } => subscription::lanes(&context, &name, lanes).await,
            }
        }
        Command::Doctor { json } => doctor::run(&inspect()?, json).await,
    }
}
