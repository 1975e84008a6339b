//! What happens to the bytes of one direction of one connection.

use std::sync::atomic::Ordering;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};

use super::{Direction, Fault, Shared};

/// Bytes held back per connection before the proxy stops reading, as a full socket would.
const HELD_BYTES_MAX: usize = 1024 * 1024;
/// Read at once.
const CHUNK_BYTES: usize = 16 * 1024;

/// The connection ends with RST on both sides.
pub(super) struct Reset;

impl From<std::io::Error> for Reset {
    fn from(_: std::io::Error) -> Self {
        Self
    }
}

/// One direction of one connection.
pub(super) struct Pump<'a> {
    shared: &'a Shared,
    direction: Direction,
    random: SmallRng,
    /// Read and not passed on.
    kept: Vec<u8>,
    /// Passed on under the present fault.
    passed: usize,
    /// The other side says no more.
    ended: bool,
}

impl<'a> Pump<'a> {
    pub(super) fn new(shared: &'a Shared, direction: Direction, number: u64) -> Self {
        let random = SmallRng::seed_from_u64(shared.seed ^ (number << 1) ^ direction as u64);
        Self { shared, direction, random, kept: Vec::new(), passed: 0, ended: false }
    }

    pub(super) async fn run(mut self, mut from: ReadHalf<'_>, mut to: WriteHalf<'_>) -> Result<(), Reset> {
        let mut faults = self.shared.faults[self.direction as usize].subscribe();
        let mut lose = self.shared.lose.subscribe();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let fault = faults.borrow_and_update().clone();
            lose.mark_unchanged();
            self.apply(&fault, &mut to).await?;
            if self.ended && self.kept.is_empty() {
                let _ = to.shutdown().await;
                return Ok(());
            }
            tokio::select! {
                _ = faults.changed() => self.passed = 0,
                _ = lose.changed() => {}
                read = from.read(&mut chunk), if !self.ended && self.kept.len() < HELD_BYTES_MAX => match read? {
                    0 => self.ended = true,
                    n => self.kept.extend_from_slice(&chunk[..n]),
                }
            }
        }
    }

    /// Does to the kept bytes what the fault says.
    async fn apply(&mut self, fault: &Fault, to: &mut WriteHalf<'_>) -> Result<(), Reset> {
        match fault {
            Fault::None => self.pass(usize::MAX, to).await?,
            Fault::Delay { base, jitter } if !self.kept.is_empty() => {
                tokio::time::sleep(*base + jitter.mul_f64(self.random.random())).await;
                self.pass(usize::MAX, to).await?;
            }
            Fault::Delay { .. } => {}
            Fault::CutAfter(bytes) => {
                self.pass(bytes.saturating_sub(self.passed), to).await?;
                if self.passed >= *bytes {
                    return Err(Reset);
                }
            }
            Fault::Hold => self.note_held(),
            Fault::Blackhole => {
                self.note_held();
                self.kept.clear();
            }
            Fault::HalfClose => {
                to.shutdown().await?;
                self.kept.clear();
            }
        }
        Ok(())
    }

    async fn pass(&mut self, bytes_max: usize, to: &mut WriteHalf<'_>) -> Result<(), Reset> {
        let wanted = self.shared.lose.borrow().clone().filter(|_| self.direction == Direction::ToClient);
        let before = wanted.as_ref().map_or(Before::Nothing, |answer| self.before(answer));
        let free = match before {
            Before::Whole(bytes) | Before::Begun(bytes) => bytes,
            Before::Nothing => self.kept.len(),
        };
        let bytes = free.min(bytes_max);
        let piece: Vec<u8> = self.kept.drain(..bytes).collect();
        to.write_all(&piece).await?;
        self.passed += bytes;
        if matches!(before, Before::Whole(_)) && bytes == free && self.take(wanted) {
            self.shared.lost.fetch_add(1, Ordering::SeqCst);
            self.shared.event.notify_waiters();
            return Err(Reset);
        }
        Ok(())
    }

    /// Where the answer that shall be lost is in the kept bytes.
    fn before(&self, answer: &[u8]) -> Before {
        if let Some(bytes) = self.kept.windows(answer.len()).position(|window| window == answer) {
            return Before::Whole(bytes);
        }
        let last = self.kept.len().saturating_sub(answer.len() - 1);
        match (last..self.kept.len()).find(|from| answer.starts_with(&self.kept[*from..])) {
            Some(bytes) if !self.ended => Before::Begun(bytes),
            _ => Before::Nothing,
        }
    }

    /// Whether it is this connection that loses the answer: one does, and it is over for the others.
    fn take(&self, answer: Option<Vec<u8>>) -> bool {
        self.shared.lose.send_if_modified(|wanted| {
            let ours = *wanted == answer;
            if ours {
                *wanted = None;
            }
            ours
        })
    }

    fn note_held(&self) {
        if !self.kept.is_empty() {
            self.shared.held[self.direction as usize].fetch_add(1, Ordering::SeqCst);
            self.shared.event.notify_waiters();
        }
    }
}

/// How many kept bytes come before the answer that shall be lost.
enum Before {
    /// All of it is there.
    Whole(usize),
    /// The last bytes may be its beginning.
    Begun(usize),
    /// There is none of it.
    Nothing,
}
