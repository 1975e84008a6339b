//! What the bodies of one source hold in memory together, and which of them makes room.
//!
//! Before its last byte is here nothing tells a stranger's body from a genuine one. So it must not
//! be the last comer who is sent away when the buffer is full: strangers whose bodies never end
//! would keep everybody out. The body that began first, and is not verified, makes room; a genuine
//! one is here within moments of its first byte.

//!
//! The bytes lie here until the body is whole, so that making room frees memory at once, whenever
//! the task that read them runs next.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::answer::Answer;

/// A body grows by pieces of this size at most: what is reserved and not used is less than a piece,
/// and nothing is moved while it grows.
const PIECE_BYTES_MAX: usize = 64 * 1024;

/// The buffer of one source.
pub(crate) struct Buffer(Mutex<State>);

struct State {
    free: usize,
    /// What is not verified, by a number that grows with time.
    unverified: BTreeMap<u64, Held>,
    next: u64,
}

struct Held {
    /// What is reserved for it, be it still in here or taken out to be verified.
    bytes: usize,
    pieces: Vec<Vec<u8>>,
    pushed_out: Arc<Notify>,
}

impl Buffer {
    pub(crate) fn new(bytes: usize) -> Self {
        Self(Mutex::new(State { free: bytes, unverified: BTreeMap::new(), next: 0 }))
    }

    /// A share for one body; it holds nothing yet.
    pub(crate) fn share(&self) -> Share<'_> {
        Share { buffer: self, number: None, kept: 0, pushed_out: Arc::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Reserves memory, at the cost of whoever began first. [`Answer::Busy`] if verified messages
    /// on their way into the store hold the rest.
    fn reserve(&mut self, number: u64, bytes: usize) -> Result<&mut Held, Answer> {
        while self.free < bytes && self.unverified.len() > 1 {
            let Some((_, first)) = self.unverified.pop_first() else { break };
            self.free += first.bytes;
            first.pushed_out.notify_one();
        }
        // It may have been the first itself.
        let held = self.unverified.get_mut(&number).ok_or(Answer::BodyPushedOut)?;
        self.free = self.free.checked_sub(bytes).ok_or(Answer::Busy)?;
        held.bytes += bytes;
        Ok(held)
    }
}

/// One body's part of the buffer. Dropping it gives back what it holds.
pub(crate) struct Share<'a> {
    buffer: &'a Buffer,
    /// Its number among those that are not verified, once it holds anything.
    number: Option<u64>,
    /// What it holds since it is verified.
    kept: usize,
    pushed_out: Arc<Notify>,
}

impl Share<'_> {
    /// Resolves when this body has made room.
    pub(crate) fn pushed_out(&self) -> impl Future<Output = ()> + use<> {
        let pushed_out = Arc::clone(&self.pushed_out);
        async move { pushed_out.notified().await }
    }

    /// Adds to the body, which has `length` bytes so far and will have `most` at most.
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

    /// The body, which is whole. It can still be pushed out.
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
        // Each piece goes as soon as it is copied.
        pieces.into_iter().for_each(|piece| whole.extend_from_slice(&piece));
        Ok(whole.into())
    }

    /// It is verified and stays until it is dropped; unless it has made room already.
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
