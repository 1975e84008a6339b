//! Bounds the memory that the bodies of one source hold, and chooses which body makes room.
//!
//! Until its last byte has arrived, a stranger's body cannot be distinguished from a genuine one.
//! So a full buffer must not reject the newest body: strangers whose bodies never end would keep
//! everybody out. Instead the oldest unverified body is dropped. A genuine body arrives within
//! moments of its first byte.
//!
//! The buffer owns the bytes until the body is complete, so dropping a body frees its memory at
//! once, whenever the task that reads it runs next.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use postbox_core::lock;
use tokio::sync::Notify;

use crate::answer::Answer;

/// Largest piece by which a body grows. Less than one piece is reserved and unused, and growing
/// moves no bytes.
const PIECE_BYTES_MAX: usize = 64 * 1024;

/// The buffer of one source.
pub(crate) struct Buffer(Mutex<State>);

struct State {
    free: usize,
    /// Unverified bodies, oldest first: numbers grow with time.
    unverified: BTreeMap<u64, Held>,
    next: u64,
}

struct Held {
    /// Bytes reserved for it, whether still in here or taken out for verification.
    bytes: usize,
    pieces: Vec<Vec<u8>>,
    pushed_out: Arc<Notify>,
}

impl Buffer {
    pub(crate) fn new(bytes: usize) -> Self {
        Self(Mutex::new(State { free: bytes, unverified: BTreeMap::new(), next: 0 }))
    }

    /// Returns an empty share, for one body.
    pub(crate) fn share(&self) -> Share<'_> {
        Share { buffer: self, number: None, kept: 0, pushed_out: Arc::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl State {
    /// Reserves memory, dropping the oldest unverified bodies if needed. [`Answer::Busy`] if
    /// verified messages that are being stored hold the rest.
    fn reserve(&mut self, number: u64, bytes: usize) -> Result<&mut Held, Answer> {
        while self.free < bytes && self.unverified.len() > 1 {
            let Some((_, first)) = self.unverified.pop_first() else { break };
            self.free += first.bytes;
            first.pushed_out.notify_one();
        }
        // This body may have been the oldest.
        let held = self.unverified.get_mut(&number).ok_or(Answer::BodyPushedOut)?;
        self.free = self.free.checked_sub(bytes).ok_or(Answer::Busy)?;
        held.bytes += bytes;
        Ok(held)
    }
}

/// One body's share of the buffer. Dropping it releases its memory.
pub(crate) struct Share<'a> {
    buffer: &'a Buffer,
    /// Its number among the unverified bodies, once it holds anything.
    number: Option<u64>,
    /// Bytes it holds as a verified body.
    kept: usize,
    pushed_out: Arc<Notify>,
}

impl Share<'_> {
    /// Resolves when this body was dropped to make room.
    pub(crate) fn pushed_out(&self) -> impl Future<Output = ()> + use<> {
        let pushed_out = Arc::clone(&self.pushed_out);
        async move { pushed_out.notified().await }
    }

    /// Appends a chunk to a body of `length` bytes, which will have at most `most`.
    pub(crate) fn append(&mut self, chunk: &[u8], length: usize, most: usize) -> Result<(), Answer> {
        let mut state = self.buffer.state();
        let number = *self.number.get_or_insert_with(|| {
            let number = state.next;
            state.next += 1;
            let pushed_out = Arc::clone(&self.pushed_out);
            state.unverified.insert(number, Held { bytes: 0, pieces: Vec::new(), pushed_out });
            number
        });
        let held = state.unverified.get_mut(&number).ok_or(Answer::BodyPushedOut)?;
        let mut rest = chunk;
        if let Some(last) = held.pieces.last_mut() {
            let (fits, more) = chunk.split_at(chunk.len().min(last.capacity() - last.len()));
            last.extend_from_slice(fits);
            rest = more;
        }
        if !rest.is_empty() {
            let to_come = most.saturating_sub(length + chunk.len() - rest.len());
            let wanted = rest.len().max(length.min(PIECE_BYTES_MAX).min(to_come));
            let held = state.reserve(number, wanted)?;
            let mut piece = Vec::with_capacity(wanted);
            piece.extend_from_slice(rest);
            held.pieces.push(piece);
        }
        Ok(())
    }

    /// Returns the complete body. It counts as unverified and can still be dropped.
    pub(crate) fn take(&mut self) -> Result<Bytes, Answer> {
        let Some(number) = self.number else { return Ok(Bytes::new()) };
        let mut state = self.buffer.state();
        let held = state.unverified.get_mut(&number).ok_or(Answer::BodyPushedOut)?;
        let mut pieces = std::mem::take(&mut held.pieces);
        drop(state);
        if pieces.len() == 1 {
            return Ok(pieces.remove(0).into());
        }
        let mut whole = Vec::with_capacity(pieces.iter().map(Vec::len).sum());
        // Each piece is freed as soon as it is copied.
        pieces.into_iter().for_each(|piece| whole.extend_from_slice(&piece));
        Ok(whole.into())
    }

    /// Marks the body as verified: it keeps its memory until the share is dropped. Fails if it was
    /// dropped to make room.
    pub(crate) fn keep(&mut self) -> Result<(), Answer> {
        let Some(number) = self.number.take() else { return Ok(()) };
        let held = self.buffer.state().unverified.remove(&number).ok_or(Answer::BodyPushedOut)?;
        self.kept = held.bytes;
        Ok(())
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        let mut state = self.buffer.state();
        let held = self.number.and_then(|number| state.unverified.remove(&number));
        state.free += self.kept + held.map_or(0, |held| held.bytes);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn is_out(share: &Share<'_>) -> bool {
        share.pushed_out().now_or_never().is_some()
    }

    #[test]
    fn who_began_first_makes_room_and_the_last_comer_is_served() {
        let buffer = Buffer::new(100);
        let [mut first, mut second, mut last] = [buffer.share(), buffer.share(), buffer.share()];
        first.append(&[7; 60], 0, 100).expect("there is room");
        second.append(&[7; 40], 0, 100).expect("there is room");
        last.append(&[7; 60], 0, 100).expect("the first makes room");
        assert!(is_out(&first) && !is_out(&second));
        assert_eq!(first.append(&[7; 1], 0, 100), Err(Answer::BodyPushedOut));
        last.append(&[7; 1], 0, 100).expect("the second makes room");
        assert_eq!(second.keep(), Err(Answer::BodyPushedOut));
        drop((first, second, last));
        assert_eq!(buffer.state().free, 100);
    }

    #[test]
    fn what_is_verified_stays() {
        let buffer = Buffer::new(100);
        let [mut genuine, mut stranger] = [buffer.share(), buffer.share()];
        genuine.append(&[7; 80], 0, 100).expect("there is room");
        genuine.keep().expect("it was not pushed out");
        stranger.append(&[7; 20], 0, 100).expect("there is room");
        assert_eq!(stranger.append(&[7; 1], 0, 100), Err(Answer::Busy));
        let mut last = buffer.share();
        last.append(&[7; 20], 0, 100).expect("the stranger makes room");
        assert_eq!(buffer.share().append(&[7; 21], 0, 100), Err(Answer::Busy), "and nobody else can");
        drop((genuine, stranger));
        assert_eq!(buffer.state().free, 100);
        drop(last);
        assert_eq!(buffer.state().free, 100);
    }

    #[test]
    fn whoever_is_first_and_wants_more_than_there_is_goes() {
        let buffer = Buffer::new(100);
        let [mut first, mut second] = [buffer.share(), buffer.share()];
        first.append(&[7; 50], 0, 100).expect("there is room");
        second.append(&[7; 50], 0, 100).expect("there is room");
        assert_eq!(first.append(&[7; 1], 0, 100), Err(Answer::BodyPushedOut));
        second.append(&[7; 50], 0, 100).expect("the first has gone");
    }
}
