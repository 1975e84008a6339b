//! The crash ledger: `cargo xtask crash`. Real processes, faults drawn from a seed, and a checker
//! that shares no code with the product. A run consists of rounds; each has its own seed, and a
//! folder with everything that the checker judges.

mod endpoint;
mod faults;
mod options;
mod process;
mod relay;
mod report;
mod round;
mod stage;
mod store;
mod writer;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use postbox_crash_checker::{Verdict, judge};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use crate::options::Options;
use crate::round::Share;

#[derive(Parser)]
#[command(name = "cargo xtask crash", about = "The crash ledger: what is lost while everything dies")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// A whole run.
    Run(Box<Options>),
    /// Judges the folder of a round again.
    Judge {
        /// `…/round-N`
        folder: PathBuf,
    },
    /// A process that writes.
    #[command(hide = true)]
    Writer(writer::Job),
    /// A process that events are sent to.
    #[command(hide = true)]
    Endpoint(endpoint::Job),
}

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let ended = runtime.map_err(anyhow::Error::from).and_then(|runtime| {
        runtime.block_on(async {
            match Arguments::parse().task {
                Task::Run(options) => run(*options).await,
                Task::Judge { folder } => judge_again(&folder),
                Task::Writer(job) => job.run().await.map(|()| true),
                Task::Endpoint(job) => job.run().await.map(|()| true),
            }
        })
    });
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "crash: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints a progress line.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
    let _ = std::io::stdout().flush();
}

fn judge_again(folder: &Path) -> anyhow::Result<bool> {
    let verdict = judge(folder)?;
    say(&serde_json::to_string_pretty(&verdict)?);
    Ok(verdict.is_clean())
}

async fn run(options: Options) -> anyhow::Result<bool> {
    let began = Instant::now();
    let (options, folder) = match options.resume.clone() {
        Some(folder) => {
            let kept = serde_json::from_slice(&std::fs::read(folder.join("run.json"))?)?;
            (options.resumed(&kept).context("run.json is not of this version")?, folder)
        }
        None => {
            let name = format!("{}-{}-{:x}", options.store.name(), options.seed, writer::now_micros());
            let folder = options.folder.join(name);
            std::fs::create_dir_all(&folder)?;
            std::fs::write(folder.join("run.json"), serde_json::to_vec_pretty(&options.to_json())?)?;
            (options, folder)
        }
    };
    let folder = folder.canonicalize()?;
    say(&format!("crash ledger, seed {}; again: {}", options.seed, options.command()));
    say(&format!("folder {}", folder.display()));
    let mut all = Verdict::default();
    let rounds = options.rounds();
    for number in 0..rounds {
        let kept = folder.join(format!("verdict-{number}.json"));
        if kept.is_file() {
            all.add(&serde_json::from_slice(&std::fs::read(&kept)?)?);
            continue;
        }
        if options.minutes.is_some_and(|minutes| began.elapsed().as_secs_f64() > minutes * 60.0) {
            say(&format!("{number} of {rounds} rounds; go on with: cargo xtask crash --resume {}", folder.display()));
            break;
        }
        let share = share(&options, number);
        say(&format!("round {} of {rounds}, seed {}", number + 1, share.seed));
        let place = folder.join(format!("round-{number}"));
        // An interrupted round starts again, because its files are incomplete.
        let _ = std::fs::remove_dir_all(&place);
        let verdict = round::run(&options, &share, &place).await.with_context(|| format!("round {}", number + 1))?;
        std::fs::write(&kept, serde_json::to_vec_pretty(&verdict)?)?;
        let clean = verdict.is_clean();
        say(&format!(
            "  {:.0} s: {} events, {} faults: {}",
            began.elapsed().as_secs_f64(),
            verdict.events,
            verdict.faults.values().sum::<u64>(),
            if clean { "clean".to_owned() } else { format!("{:?}", verdict.violations) }
        ));
        all.add(&verdict);
        if clean {
            let _ = std::fs::remove_dir_all(&place);
        } else if !options.keep_going {
            break;
        }
    }
    let table = report::table(&options, &all);
    std::fs::write(folder.join("table.md"), &table)?;
    say(&format!("\n{table}"));
    all.named.iter().for_each(|named| say(&format!("- {named}")));
    Ok(all.is_clean())
}

/// Returns the amount of work and the seed of a round.
fn share(options: &Options, number: u64) -> Share {
    let rounds = options.rounds();
    let seed = SmallRng::seed_from_u64(options.seed.wrapping_add(number << 20)).random::<u32>();
    let (events, faults) = (options.events.div_ceil(rounds), options.faults.div_ceil(rounds));
    Share { events, faults, seed: u64::from(seed) }
}
