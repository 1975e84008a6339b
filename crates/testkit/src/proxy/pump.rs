//! Forwards the bytes of one direction of one connection.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use postbox_core::lock;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};

use super::trap::{Armed, Harm};
use super::wire::Talk;
use super::{Direction, Shared};

/// Bytes read at once.
const CHUNK_BYTES: usize = 16 * 1024;

/// How a connection ends early.
pub(super) enum End {
    /// With RST on both sides.
    Reset,
    /// With a call that the server is to get later.
    Held(Arc<Armed>),
}

impl From<std::io::Error> for End {
    fn from(_: std::io::Error) -> Self {
        Self::Reset
    }
}

/// One connection: its conversation, and the trap that affects it.
#[derive(Debug, Default)]
pub(super) struct Line {
    pub(super) talk: Talk,
    /// The trap that loses an answer here, and the first answer that it may be.
    losing: Option<(Arc<Armed>, u64)>,
}

/// One direction of one connection.
pub(super) struct Pump<'a> {
    shared: &'a Shared,
    line: &'a Mutex<Line>,
    direction: Direction,
    /// Bytes read and not passed on yet.
    pub(super) kept: Vec<u8>,
    /// How many of these bytes have been parsed.
    seen: usize,
    /// The trap whose delayed call the kept bytes belong to.
    holding: Option<Arc<Armed>>,
    /// The sender has closed its side.
    ended: bool,
}

impl<'a> Pump<'a> {
    pub(super) fn new(shared: &'a Shared, line: &'a Mutex<Line>, direction: Direction) -> Self {
        Self { shared, line, direction, kept: Vec::new(), seen: 0, holding: None, ended: false }
    }

    pub(super) async fn run(&mut self, mut from: ReadHalf<'_>, mut to: WriteHalf<'_>) -> Result<(), End> {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let (free, end) = match self.direction {
                Direction::ToServer => self.look_at_requests(),
                Direction::ToClient => self.look_at_answers(),
            };
            self.seen -= free;
            let piece: Vec<u8> = self.kept.drain(..free).collect();
            self.send(&piece, &mut to).await?;
            if let Some(end) = end {
                return Err(end);
            }
            if self.ended {
                let _ = to.shutdown().await;
                return Ok(());
            }
            match from.read(&mut chunk).await? {
                0 => self.ended = true,
                n => self.kept.extend_from_slice(&chunk[..n]),
            }
        }
    }

    async fn send(&self, piece: &[u8], to: &mut WriteHalf<'_>) -> Result<(), End> {
        let direction = self.direction as usize;
        if !self.shared.blackholes[direction].load(Ordering::SeqCst) {
            to.write_all(piece).await?;
        } else if !piece.is_empty() {
            self.shared.swallowed[direction].send_modify(|bytes| *bytes += piece.len());
        }
        Ok(())
    }

    /// Returns how many kept bytes may go to the server, and how the connection then ends, if it
    /// does.
    fn look_at_requests(&mut self) -> (usize, Option<End>) {
        let mut line = lock(self.line);
        let mut free = (self.holding.is_none()).then_some(self.seen);
        while let Some(length) = line.talk.next_asked(&self.kept[self.seen..]) {
            let before = line.talk.asked;
            let said = line.talk.ask(&self.kept[self.seen..self.seen + length]);
            let sprung = self.holding.is_none().then(|| self.shared.spring(&said, &line.talk.call)).flatten();
            if let Some(armed) = sprung {
                match armed.harm {
                    Harm::LoseAnswer => line.losing = Some((armed, before)),
                    Harm::Cut => {
                        armed.spring(line.talk.call.clone());
                        armed.answered(&line.talk);
                        return (self.seen, Some(End::Reset));
                    }
                    Harm::Refuse => {
                        // After the type and the length, up to the NUL at the end.
                        let text = self.seen + 5..self.seen + length - 1;
                        self.kept[text].fill(b'?');
                        armed.spring(line.talk.call.clone());
                    }
                    Harm::Delay | Harm::Hang => self.holding = Some(armed),
                }
            }
            self.seen += length;
            if self.holding.is_none() {
                free = Some(self.seen);
            } else if said.last {
                return (free.unwrap_or_default(), self.holding.take().map(End::Held));
            }
        }
        match self.ended {
            true if self.holding.is_some() => (free.unwrap_or_default(), self.holding.take().map(End::Held)),
            true => (self.all(), None),
            false => (free.unwrap_or_default(), None),
        }
    }

    /// Returns how many kept bytes may go to the client, and how the connection then ends, if it
    /// does.
    fn look_at_answers(&mut self) -> (usize, Option<End>) {
        let mut line = lock(self.line);
        let mut free = 0;
        while let Some(length) = line.talk.next_answered(&self.kept[self.seen..]) {
            let is_lost = line.losing.as_ref().is_some_and(|(_, first)| line.talk.answered >= *first);
            let over = line.talk.hear(&self.kept[self.seen..self.seen + length]);
            self.seen += length;
            if is_lost && over == Some(true) {
                return (free, line.lose());
            }
            // Whether an answer is the last one is known only at its end.
            if !is_lost || over.is_some() {
                free = self.seen;
            }
        }
        match self.ended {
            true if line.losing.is_some() => (free, line.lose()),
            true => (self.all(), None),
            false => (free, None),
        }
    }

    fn all(&mut self) -> usize {
        self.seen = self.kept.len();
        self.seen
    }
}

impl Line {
    fn lose(&mut self) -> Option<End> {
        let (armed, _) = self.losing.take()?;
        armed.answered(&self.talk);
        armed.spring(self.talk.call.clone());
        Some(End::Reset)
    }

    /// Consumes answers that nobody waits for. Returns whether those were all.
    fn is_answered(&mut self, heard: &mut Vec<u8>) -> bool {
        while let Some(length) = self.talk.next_answered(heard) {
            self.talk.hear(&heard.drain(..length).collect::<Vec<_>>());
        }
        self.talk.answered >= self.talk.asked
    }
}

/// Sends the held bytes to the server and reads all answers. Otherwise the server might discard
/// requests that it has not read yet.
pub(super) async fn deliver(server: &mut TcpStream, held: &[u8], mut heard: Vec<u8>, line: &Mutex<Line>) {
    let (mut read, mut write) = server.split();
    let hear = async {
        let mut chunk = vec![0; CHUNK_BYTES];
        while !lock(line).is_answered(&mut heard) {
            match read.read(&mut chunk).await {
                Ok(n) if n > 0 => heard.extend_from_slice(&chunk[..n]),
                _ => return,
            }
        }
    };
    let (_, ()) = tokio::join!(write.write_all(held), hear);
}
