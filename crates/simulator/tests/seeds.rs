//! A sample of the seeds beside the other tests. `cargo xtask test` runs 200,000 in a separate
//! step.

use postbox_simulator::{Store, repeated_after_a_crash, run_regressions, run_seed, run_seeds};

/// Beyond the seeds of that step, so that both can find something.
const FIRST: u64 = 10_000_000;

#[track_caller]
fn hold(store: Store, count: u64) {
    let summary = run_seeds(store, FIRST, count, 2, None);
    let failed = summary
        .failure
        .map(|failure| format!("{}\n{}\nreplay: {}", failure.violation, failure.history.join("\n"), failure.replay()));
    assert_eq!(failed.as_deref(), None, "{}", failed.as_deref().unwrap_or_default());
    assert_eq!(summary.seeds, count);
}

#[test]
fn plans_that_once_found_a_defect_hold() {
    assert_eq!(run_regressions(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_keeps_its_lease_is_judged_after_a_crash() {
    let found = repeated_after_a_crash().await;
    assert!(found.as_ref().is_some_and(|it| it.starts_with("repeated: ")), "{found:?}");
}

#[test]
fn seeds_hold() {
    hold(Store::Memory, 1_000);
}

#[test]
fn seeds_hold_on_sqlite() {
    hold(Store::Sqlite, 200);
}

#[test]
fn a_seed_repeats_its_history() {
    for (store, count) in [(Store::Memory, 100), (Store::Sqlite, 15)] {
        for seed in FIRST..FIRST + count {
            assert_eq!(run_seed(store, seed), run_seed(store, seed), "seed {seed} of {}", store.name());
        }
    }
    assert_ne!(run_seed(Store::Memory, 1).hash, run_seed(Store::Memory, 2).hash);
}
