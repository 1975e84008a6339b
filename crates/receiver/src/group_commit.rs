//! Messages that arrive together are stored together: one commit, and one wait for the disk.
//!
//! Batches are never delayed to fill: a free worker commits whatever is queued. A lone message
//! commits inline.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use postbox_core::trace::{self, Traced};
use postbox_core::{Clock, Error, ErrorKind, Inbound, LogName, Receive, Received, lock};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::Committed;

/// Maximum commits at once: while one waits for the disk, the next is prepared.
pub(crate) const COMMITS_MAX: usize = 2;
/// A commit takes no more messages once it has this many, or this many payload bytes.
pub(crate) const MESSAGES_MAX: usize = 256;
const COMMIT_BYTES_MAX: usize = 1024 * 1024;

/// Stores the messages of one source into its log. Callers bound the length of the queue.
pub(crate) struct GroupCommit {
    pub(crate) store: Arc<dyn Receive>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) log: LogName,
    /// Longest commit, and longest wait for one.
    pub(crate) timeout: Duration,
    /// One commit at a time, and none past a message that failed.
    pub(crate) ordered: bool,
    pub(crate) queue: Mutex<Queue>,
}

#[derive(Default)]
pub(crate) struct Queue {
    messages: VecDeque<Queued>,
    /// The payload bytes of `messages`.
    bytes: usize,
    /// Queue length, and payload bytes, at which messages whose sender is gone are dropped.
    swept_at: (usize, usize),
    workers: usize,
    /// The last commit had more than one message, so the next probably does too.
    crowded: bool,
}

struct Queued {
    inbound: Inbound,
    answer: oneshot::Sender<Committed>,
}

impl GroupCommit {
    /// Stores messages together with whatever else is queued, or fails after the timeout. Returns
    /// one result per message, in order. If dropped, they may or may not be stored.
    pub(crate) async fn commit(self: &Arc<Self>, mut inbound: Vec<Inbound>) -> Vec<Committed> {
        let begin = |Inbound { source, message_id, event, .. }: &mut Inbound| {
            Traced::receive(event, source.as_str(), message_id)
        };
        let traced: Vec<_> = if trace::is_on() { inbound.iter_mut().map(begin).collect() } else { Vec::new() };
        let committed = self.commit_all(inbound).await;
        for (traced, committed) in traced.into_iter().zip(&committed) {
            match committed {
                Ok(Received::Conflict) => traced.failed_as("conflict", "a known id with another body"),
                Ok(_) => traced.well(),
                Err(error) => traced.failed_as(error.code(), &error.to_string()),
            }
        }
        committed
    }

    async fn commit_all(self: &Arc<Self>, inbound: Vec<Inbound>) -> Vec<Committed> {
        let channel = |inbound| {
            let (answer, committed) = oneshot::channel();
            (Queued { inbound, answer }, committed)
        };
        let (queued, answers): (Vec<_>, Vec<_>) = inbound.into_iter().map(channel).unzip();
        let deadline = self.clock.sleep(self.timeout).shared();
        match self.enqueue(queued) {
            Start::Queued => {}
            Start::Inline(worker) => tokio::select! {
                biased;
                () = DetachOnDrop::new(worker.run_once()) => {}
                () = deadline.clone() => {}
            },
            // A separate task: other messages must not depend on how long this sender waits.
            Start::Spawned(worker) => drop(tokio::spawn(worker.run())),
        }
        let mut committed = Vec::with_capacity(answers.len());
        for answer in answers {
            committed.push(tokio::select! {
                biased;
                answer = answer => answer.unwrap_or_else(|_| Err(Arc::new(broken_off()))),
                () = deadline.clone() => Err(Arc::new(too_slow())),
            });
        }
        committed
    }

    fn enqueue(self: &Arc<Self>, messages: Vec<Queued>) -> Start {
        if messages.is_empty() {
            return Start::Queued;
        }
        let mut queue = self.queue();
        let many = messages.len() > 1;
        queue.bytes += messages.iter().map(Queued::bytes).sum::<usize>();
        queue.messages.extend(messages);
        queue.sweep();
        if queue.workers == if self.ordered { 1 } else { COMMITS_MAX } {
            return Start::Queued;
        }
        // A caller with many messages has nothing else to do, so it commits inline. A lone message
        // of a crowded queue goes to a task that commits others with it.
        let inline = queue.workers == 0 && (many || !queue.crowded);
        queue.workers += 1;
        let worker = Worker { group: Arc::clone(self), retired: false };
        if inline { Start::Inline(worker) } else { Start::Spawned(worker) }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Stores the messages of one commit. Returns the failure past which nothing may be stored in
    /// order.
    async fn store_all(&self, messages: Vec<Queued>) -> Option<Arc<Error>> {
        let (inbound, answers): (Vec<_>, Vec<_>) =
            messages.into_iter().map(|message| (message.inbound, message.answer)).unzip();
        let failure = match self.store(&inbound).await {
            Ok(received) => {
                for (answer, received) in answers.into_iter().zip(received) {
                    // The sender may be gone. It will send again and learn that the message is
                    // known.
                    let _ = answer.send(Ok(received));
                }
                return None;
            }
            Err(failure) => Arc::new(failure),
        };
        let alone = inbound.len() > 1 && is_of_one(&failure);
        let mut failed = (!alone).then_some(failure);
        for (inbound, answer) in inbound.chunks(1).zip(answers) {
            if let Some(failure) = &failed {
                let _ = answer.send(Err(Arc::clone(failure)));
            } else if !answer.is_closed() {
                let stored = self.store(inbound).await.map(|received| received[0]).map_err(Arc::new);
                if let Err(failure) = &stored {
                    // In order, nothing is stored past a message that may be stored later. And if
                    // the store went away, the remaining messages do not each wait for it.
                    let is_last = !is_of_one(failure) || (self.ordered && failure.kind() != ErrorKind::Invalid);
                    failed = is_last.then(|| behind(failure));
                }
                let _ = answer.send(stored);
            }
        }
        failed.filter(|failure| failure.kind() != ErrorKind::Invalid)
    }

    /// Fails all that is queued.
    fn fail_queued(&self, failure: &Arc<Error>) {
        let queued = self.queue().take_all();
        for message in queued {
            let _ = message.answer.send(Err(Arc::clone(failure)));
        }
    }

    /// Stores one commit. Returns one result per message, or a failure.
    async fn store(&self, inbound: &[Inbound]) -> Result<Vec<Received>, Error> {
        let received = tokio::select! {
            received = self.store.receive_many(&self.log, inbound) => received?,
            () = self.clock.sleep(self.timeout) => return Err(too_slow()),
        };
        if received.len() != inbound.len() {
            let text = "the store's answer has another length";
            return Err(Error::new(ErrorKind::Internal, "receive", "store_protocol", text));
        }
        Ok(received)
    }
}

fn too_slow() -> Error {
    let message = "the store did not answer in time; postbox doctor names the locks it may wait for";
    Error::new(ErrorKind::Unavailable, "receive", "store_timeout", message)
}

/// The error of messages whose commit panicked.
pub(crate) fn broken_off() -> Error {
    let text = "the call that stored this message broke off; this is a defect";
    Error::new(ErrorKind::Internal, "receive", "receive_broken_off", text)
}

/// The code of a message that was not tried, because one before it was refused.
const HELD_UP: &str = "held_up";

/// Returns the error of the messages behind one that failed.
fn behind(failure: &Arc<Error>) -> Arc<Error> {
    if !failure.is_refused_alone() {
        // The store is away for all of them.
        return Arc::clone(failure);
    }
    let text = "the store refused a message before it, and nothing is stored past that";
    Arc::new(Error::new(ErrorKind::Unavailable, "receive", HELD_UP, text))
}

/// Returns whether a message only waits for one before it. That says nothing about the message, nor
/// about the store.
pub(crate) fn is_held_up(error: &Error) -> bool {
    error.code() == HELD_UP
}

/// Returns whether a failure may be about a single message. Otherwise the store is away, busy or
/// not set up. Contention is about one: somebody holds a lock on one message.
fn is_of_one(error: &Error) -> bool {
    error.is_refused_alone() || error.code() == "store_contention"
}

impl Queue {
    /// Drops messages that nobody waits for any more, once there are twice as many as after the
    /// last sweep, or twice as many bytes: a few large ones fill the memory too.
    fn sweep(&mut self) {
        let (messages_max, bytes_max) = self.swept_at;
        let is_long = self.messages.len() >= messages_max.max(2 * MESSAGES_MAX);
        if is_long || self.bytes >= bytes_max.max(2 * COMMIT_BYTES_MAX) {
            self.messages.retain(|message| !message.answer.is_closed());
            self.bytes = self.messages.iter().map(Queued::bytes).sum();
            self.swept_at = (2 * self.messages.len(), 2 * self.bytes);
        }
    }

    fn pop(&mut self) -> Option<Queued> {
        let message = self.messages.pop_front()?;
        self.bytes -= message.bytes();
        Some(message)
    }

    fn take_all(&mut self) -> VecDeque<Queued> {
        self.bytes = 0;
        std::mem::take(&mut self.messages)
    }
}

impl Queued {
    fn bytes(&self) -> usize {
        self.inbound.event.payload.len()
    }
}

/// Who commits messages that were just queued.
enum Start {
    /// A running worker.
    Queued,
    /// The caller's own task, because no worker runs.
    Inline(Worker),
    /// A new task.
    Spawned(Worker),
}

/// One of the concurrent committers.
struct Worker {
    group: Arc<GroupCommit>,
    retired: bool,
}

impl Worker {
    /// Commits until nothing is queued.
    async fn run(mut self) {
        loop {
            // Let ready tasks run first, among them requests that are being read. Their messages
            // then share this commit instead of needing another. This is no wait.
            tokio::task::yield_now().await;
            if !self.commit_next().await {
                return;
            }
        }
    }

    /// Commits what is queued now. Leaves what has arrived meanwhile to a new task.
    async fn run_once(mut self) {
        if self.commit_next().await && !self.retire() {
            tokio::spawn(self.run());
        }
    }

    /// Makes one commit. `false`: nothing was queued, and the worker has retired.
    async fn commit_next(&mut self) -> bool {
        let Some(messages) = self.take_batch() else { return false };
        // A panic in the store fails its own messages, because their answer channels are dropped.
        let stored = AssertUnwindSafe(self.group.store_all(messages)).catch_unwind().await;
        let failed = stored.unwrap_or_else(|_| Some(Arc::new(broken_off())));
        // In order, the rest of what one call brought must not be stored past what failed.
        if let Some(failure) = failed.filter(|_| self.group.ordered) {
            self.group.fail_queued(&behind(&failure));
        }
        true
    }

    /// Retires, unless something is queued.
    fn retire(&mut self) -> bool {
        let mut queue = self.group.queue();
        self.retired = queue.messages.is_empty();
        queue.workers -= usize::from(self.retired);
        self.retired
    }

    fn take_batch(&mut self) -> Option<Vec<Queued>> {
        let mut queue = self.group.queue();
        let mut batch: Vec<Queued> = Vec::new();
        let mut bytes = 0;
        while batch.len() < MESSAGES_MAX && bytes < COMMIT_BYTES_MAX {
            let Some(message) = queue.pop() else { break };
            // If the sender is gone, the message need not be stored: nothing was promised, and it
            // will be sent again.
            if !message.answer.is_closed() {
                bytes += message.bytes();
                batch.push(message);
            }
        }
        if batch.is_empty() {
            // Under the same lock, so that the next message starts a worker.
            queue.workers -= 1;
            self.retired = true;
            return None;
        }
        queue.crowded = batch.len() > 1;
        Some(batch)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Its runtime has ended. The next message starts a new worker.
        if !self.retired {
            self.group.queue().workers -= 1;
        }
    }
}

/// A commit in its sender's own task, which saves waking another one. It may include messages of
/// other senders, and a connection's transaction must not be cut in two. So if the sender hangs up,
/// the commit goes on in a new task.
struct DetachOnDrop(Option<BoxFuture<'static, ()>>);

impl DetachOnDrop {
    fn new(commit: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(Some(Box::pin(commit)))
    }
}

impl Future for DetachOnDrop {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if let Some(commit) = &mut self.0 {
            ready!(commit.poll_unpin(context));
            self.0 = None;
        }
        Poll::Ready(())
    }
}

impl Drop for DetachOnDrop {
    fn drop(&mut self) {
        // Without a runtime everything ends.
        if let (Some(commit), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(commit);
        }
    }
}

#[cfg(test)]
mod tests;
