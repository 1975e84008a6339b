//! A slice of the seeds beside the other tests; `cargo xtask test` runs 200,000 in a step of their own.

use postbox_simulator::{run_seed, run_seeds};

/// Beyond those of the step, so that both find something.
const FIRST: u64 = 10_000_000;

#[test]
fn seeds_hold() {
    let summary = run_seeds(FIRST, 1_000, 2, None);
    let failed = summary.failure.map(|failure| {
        let history = failure.history.join("\n");
        format!("{}\n{history}\nreplay: cargo xtask simulate --seed {}", failure.violation, failure.seed)
    });
    assert_eq!(failed.as_deref(), None, "{}", failed.as_deref().unwrap_or_default());
    assert_eq!(summary.seeds, 1_000);
}

#[test]
fn a_seed_repeats_its_history() {
    for seed in FIRST..FIRST + 300 {
        assert_eq!(run_seed(seed), run_seed(seed), "seed {seed}");
    }
    assert_ne!(run_seed(1).hash, run_seed(2).hash);
}
