//! `simulate [--store memory|sqlite] [--seeds N] [--first S] [--seed S] [--seconds T]`: see
//! `cargo xtask simulate`.
#![allow(clippy::print_stdout, reason = "a command for people")]

use std::process::ExitCode;
use std::time::Duration;

use postbox_simulator::{Failure, Store, run_seeds, shrink_seed, trace_seed};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let text = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        Some(arguments.get(at + 1).expect("a value after the option"))
    };
    let number = |name: &str| text(name).map(|text| text.parse::<u64>().expect("a number after the option"));
    let named = text("--store").map_or(Store::default().name(), String::as_str);
    let store = [Store::Memory, Store::Sqlite].into_iter().find(|store| store.name() == named);
    let store = store.expect("--store memory, or --store sqlite");
    if let Some(seed) = number("--seed") {
        return replay(store, seed);
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = number("--threads").map_or(threads, |threads| threads as usize);
    let limit = number("--seconds").map(Duration::from_secs);
    let first = number("--first").unwrap_or(0);
    let summary = run_seeds(store, first, number("--seeds").unwrap_or(store.seeds()), threads, limit);
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
