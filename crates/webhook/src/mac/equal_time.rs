//! Comparing a code takes the same time wherever the first wrong byte is. Otherwise a sender could
//! find the right code byte by byte.
//!
//! Timings are noisy, and a check that fails now and then is soon ignored. So the property is shown
//! in two ways that noise cannot falsify, and both are shown to fail for comparisons that stop
//! early:
//!
//! - **By counting.** [`same`] is generic over its element. With a byte type that counts its own
//!   comparisons, every pair must be compared exactly once, wherever the difference is. This is
//!   exact, but it covers only the source code.
//! - **By timing the compiled code, on 64 KiB.** At this length, stopping at the first byte is
//!   thousands of times faster than comparing all of them, so the limit of a factor of two is far
//!   from both. The fastest of many interleaved runs is used; a busy machine can delay it, but not
//!   falsify it.
//!
//! No other code compares MACs, by type: [`Mac`] has no `==`, only [`Mac::is`]. Public-key
//! signatures (Ed25519, RSA) are checked with public data and cannot leak anything.

use std::cell::Cell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use subtle::{Choice, ConstantTimeEq};

use super::same;

thread_local! {
    static COMPARISONS: Cell<usize> = const { Cell::new(0) };
}

/// A byte that counts comparisons of its type.
struct Counted(u8);

impl ConstantTimeEq for Counted {
    fn ct_eq(&self, other: &Self) -> Choice {
        COMPARISONS.set(COMPARISONS.get() + 1);
        self.0.ct_eq(&other.0)
    }
}

/// The tempting wrong way: it stops at the first difference.
fn stops_early<T: ConstantTimeEq, const N: usize>(ours: &[T; N], theirs: &[T; N]) -> bool {
    ours.iter().zip(theirs).all(|(our, their)| our.ct_eq(their).into())
}

/// A subtler wrong way: it compares in steps of four.
fn stops_after_words<T: ConstantTimeEq, const N: usize>(ours: &[T; N], theirs: &[T; N]) -> bool {
    ours.chunks(4).zip(theirs.chunks(4)).all(|(our, their)| our.ct_eq(their).into())
}

/// Whether every pair is compared exactly once, wherever the difference is, and the result is
/// right.
fn compares_all<const N: usize>(equal: impl Fn(&[Counted; N], &[Counted; N]) -> bool) -> bool {
    let ours: [Counted; N] = std::array::from_fn(|_| Counted(7));
    (0..=N).all(|different| {
        let theirs = std::array::from_fn(|at| Counted(if at == different { 8 } else { 7 }));
        COMPARISONS.set(0);
        equal(&ours, &theirs) == (different == N) && COMPARISONS.get() == N
    })
}

#[test]
fn every_byte_is_compared_wherever_the_difference_lies() {
    assert!(compares_all::<20>(same) && compares_all::<32>(same) && compares_all::<64>(same));
    assert!(!compares_all::<32>(stops_early), "this check would not notice");
    assert!(!compares_all::<32>(stops_after_words), "this check would not notice");
}

const LONG: usize = 64 * 1024;
/// Enough that the scheduler leaves one run of each kind undisturbed; a run takes some tens of
/// microseconds.
const RUNS: usize = 200;

/// The ratio of two durations, the longer to the shorter: comparing arrays that differ in the first
/// byte, and in the last.
fn spread(equal: impl Fn(&[u8; LONG], &[u8; LONG]) -> bool) -> f64 {
    let ours = Box::new([7; LONG]);
    let differing = |at: usize| {
        let mut theirs = ours.clone();
        theirs[at] = 8;
        theirs
    };
    let kinds = [differing(0), differing(LONG - 1)];
    let mut fastest = [Duration::MAX; 2];
    for _ in 0..RUNS {
        for (theirs, fastest) in kinds.iter().zip(&mut fastest) {
            let start = Instant::now();
            assert!(!black_box(equal(black_box(&ours), black_box(theirs))));
            *fastest = start.elapsed().min(*fastest);
        }
    }
    let [first, last] = fastest.map(|time| time.as_secs_f64().max(1e-9));
    f64::max(first / last, last / first)
}

#[test]
fn what_was_compiled_takes_as_long_for_a_wrong_first_byte_as_for_a_wrong_last() {
    let ours = spread(same);
    assert!(ours < 2.0, "one kind of comparison takes {ours:.1} times as long as the other");
    let early = spread(stops_early);
    assert!(early > 2.0, "this check would not notice: {early:.1}");
    let words = spread(stops_after_words);
    assert!(words > 2.0, "this check would not notice: {words:.1}");
    // `==` stops early too, though not at the first byte but at the processor's widest word.
    let ordinary = spread(|ours, theirs| ours == theirs);
    assert!(ordinary > 2.0, "this check would not notice: {ordinary:.1}");
}
