//! `simulate`: see `cargo xtask simulate`.
#![allow(clippy::print_stdout, reason = "a command for people")]

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use postbox_simulator::{Failure, Store, run_seeds, shrink_seed, trace_seed};

/// Simulated worlds from seeds: relays, their store and their destination under faults.
#[derive(Parser)]
#[command(name = "simulate")]
struct Options {
    /// The store of the worlds
    #[arg(long, value_enum, default_value_t)]
    store: Store,
    /// Number of worlds [default: 200,000 for memory, 2,000 for sqlite]
    #[arg(long)]
    seeds: Option<u64>,
    /// The first seed
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Run only this seed: print what happens, and shorten it if it fails
    #[arg(long)]
    seed: Option<u64>,
    /// Number of worlds run at a time [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
    /// Start no world after this many seconds
    #[arg(long)]
    seconds: Option<u64>,
}

fn main() -> ExitCode {
    let Options { store, seeds, first, seed, threads, seconds } = Options::parse();
    if let Some(seed) = seed {
        return replay(store, seed);
    }
    let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let limit = seconds.map(Duration::from_secs);
    let summary = run_seeds(store, first, seeds.unwrap_or(store.seeds()), threads, limit);
    let rate = summary.seeds as f64 / summary.took.as_secs_f64();
    println!(
        "{} seeds from {first} in {:.1} s on {threads} threads, {rate:.0}/s, {} calls of the store, histories {:016x}",
        summary.seeds,
        summary.took.as_secs_f64(),
        summary.calls,
        summary.hash
    );
    match summary.failure {
        None => ExitCode::SUCCESS,
        Some(failure) => report(&failure),
    }
}

fn replay(store: Store, seed: u64) -> ExitCode {
    match shrink_seed(store, seed) {
        Some(failure) => report(&failure),
        None => {
            trace_seed(store, seed).iter().for_each(|line| println!("{line}"));
            println!("seed {seed} holds");
            ExitCode::SUCCESS
        }
    }
}

fn report(failure: &Failure) -> ExitCode {
    println!("\n{}\n", failure.violation);
    println!("made short:\n{}", failure.plan);
    failure.history.iter().for_each(|line| println!("{line}"));
    println!("\nseed {} failed: {}", failure.seed, failure.violation);
    println!("replay: {}", failure.replay());
    ExitCode::FAILURE
}
