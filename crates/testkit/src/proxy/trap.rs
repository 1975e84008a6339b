//! One call that is harmed on its way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;

use super::wire::{Said, Talk};

/// The point at which a call is harmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Point {
    /// At the n-th message that clients send from now on, counted from 1 over all connections.
    Message(usize),
    /// At the first statement that contains this text.
    Statement(String),
    /// At the end of the first transaction with such a statement, while it holds its locks.
    CommitOf(String),
}

/// The kind of harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harm {
    /// The connection is reset before the server gets the message.
    Cut,
    /// The server gets a statement that it refuses, instead of a simple one (`BEGIN`), and then
    /// what follows.
    Refuse,
    /// The server executes the whole call. Its last answer is swallowed and the connection reset.
    LoseAnswer,
    /// The call is kept from here to its end and the client is reset. [`Trap::release`] lets it go
    /// on.
    Delay,
    /// Like [`Self::Delay`], but the client is left waiting.
    Hang,
}

/// A call that will be harmed, once. Dropping this disarms it and discards what it holds.
#[derive(Debug)]
pub struct Trap {
    pub(super) armed: Arc<Armed>,
    release: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Progress {
    sprung: bool,
    call: Vec<String>,
    answer: Option<Vec<String>>,
}

/// The part of a trap that connections see.
#[derive(Debug)]
pub(super) struct Armed {
    point: Point,
    pub(super) harm: Harm,
    messages: AtomicUsize,
    progress: watch::Sender<Progress>,
    pub(super) released: watch::Receiver<bool>,
}

impl Trap {
    pub(super) fn new(point: Point, harm: Harm) -> Self {
        let (release, released) = watch::channel(false);
        let (messages, progress) = Default::default();
        Self { armed: Arc::new(Armed { point, harm, messages, progress, released }), release }
    }

    /// Waits until it happened. If an answer is lost, the server has given it by then.
    pub async fn sprung(&self) {
        self.wait(|progress| progress.sprung).await;
    }

    /// Returns whether it happened.
    pub fn is_sprung(&self) -> bool {
        self.armed.progress.borrow().sprung
    }

    /// Returns the statements of the harmed call, as far as the client had sent them.
    pub fn call(&self) -> Vec<String> {
        self.armed.progress.borrow().call.clone()
    }

    /// Lets a delayed call go on, and waits for its answer ([`Self::answer`]).
    pub async fn release(&self) -> Vec<String> {
        self.sprung().await;
        self.release.send_replace(true);
        self.answer().await
    }

    /// Returns the server's lost answer: command tags, and `ERROR` with its SQLSTATE.
    pub async fn answer(&self) -> Vec<String> {
        self.wait(|progress| progress.answer.is_some()).await;
        self.armed.progress.borrow().answer.clone().unwrap_or_default()
    }

    async fn wait(&self, condition: impl Fn(&Progress) -> bool) {
        let mut progress = self.armed.progress.subscribe();
        progress.wait_for(condition).await.expect("we hold the sender");
    }
}

impl Armed {
    /// Returns whether this message springs the trap.
    pub(super) fn springs(&self, said: &Said, call: &[String]) -> bool {
        let has = |text: &str| said.statement.as_ref().is_some_and(|statement| statement.contains(text));
        match &self.point {
            Point::Message(n) => self.messages.fetch_add(1, Ordering::SeqCst) + 1 == *n,
            Point::Statement(text) => has(text),
            Point::CommitOf(text) => {
                said.last && said.statement.is_some() && call.iter().any(|statement| statement.contains(text))
            }
        }
    }

    pub(super) fn spring(&self, call: Vec<String>) {
        self.progress.send_modify(|progress| (progress.sprung, progress.call) = (true, call));
    }

    /// Notes that the server has answered, or is gone.
    pub(super) fn answered(&self, talk: &Talk) {
        self.progress.send_modify(|progress| progress.answer = Some(talk.answer.clone()));
    }
}
