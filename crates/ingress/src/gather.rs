//! Messages that come together are stored together: one commit, and one wait for the disk, for all that arrived while the last one ran.
//!
//! Nobody waits for company: a call leaves with whatever has arrived as soon as one is free. Who is alone, as most are, is stored by his own task.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use postbox_core::{Clock, Error, ErrorKind, Inbound, LogName, Receive, Received};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Calls to the store at once: while one waits for the disk, the next is worked on.
const FLIGHTS_MAX: usize = 2;
/// A call takes no further message once it has so many, or so many bytes of payload.
const MESSAGES_MAX: usize = 128;
const BYTES_MAX: usize = 1024 * 1024;

/// What one sender hears; the failure is shared by all of a call.
pub(crate) type Verdict = Result<Received, Arc<Error>>;

/// One source's way into its log. What waits is bounded by the source's concurrency, twice over for senders that hung up.
pub(crate) struct Gather {
    receive: Arc<dyn Receive>,
    clock: Arc<dyn Clock>,
    log: LogName,
    /// Longest call, and longest wait for one.
    timeout: Duration,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    messages: VecDeque<Message>,
    /// At so many, those whose sender has gone are let go.
    swept_at: usize,
    flights: usize,
    /// The last call had more than one message: the next is likely to have company too.
    crowded: bool,
}

struct Message {
    inbound: Inbound,
    answer: oneshot::Sender<Verdict>,
}

impl Gather {
    pub(crate) fn new(receive: Arc<dyn Receive>, clock: Arc<dyn Clock>, log: LogName, timeout: Duration) -> Arc<Self> {
        Arc::new(Self { receive, clock, log, timeout, waiting: Mutex::default() })
    }

    /// Stores one message, with whatever else is there, or fails within the time given. Dropped, the message may or may not be stored.
    pub(crate) async fn store(self: &Arc<Self>, inbound: Inbound) -> Verdict {
        let (answer, verdict) = oneshot::channel();
        match self.line_up(Message { inbound, answer }) {
            Turn::Waits => {}
            // The call has its own deadline.
            Turn::Alone(flight) => Carried::new(flight.hop()).await,
            // A task of its own: the others must not depend on this sender's patience.
            Turn::InCompany(flight) => drop(tokio::spawn(flight.fly())),
        }
        tokio::select! {
            biased;
            verdict = verdict => verdict.unwrap_or_else(|_| Err(Arc::new(broken_off()))),
            () = self.clock.sleep(self.timeout) => Err(Arc::new(too_slow())),
        }
    }

    fn line_up(self: &Arc<Self>, message: Message) -> Turn {
        let mut waiting = self.waiting();
        waiting.messages.push_back(message);
        waiting.sweep();
        if waiting.flights == FLIGHTS_MAX {
            return Turn::Waits;
        }
        let alone = waiting.flights == 0 && !waiting.crowded;
        waiting.flights += 1;
        let flight = Flight { gather: Arc::clone(self), landed: false };
        if alone { Turn::Alone(flight) } else { Turn::InCompany(flight) }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn store_all(&self, messages: Vec<Message>) {
        let (inbound, answers): (Vec<_>, Vec<_>) =
            messages.into_iter().map(|message| (message.inbound, message.answer)).unzip();
        match self.call(&inbound).await {
            Ok(verdicts) => {
                for (answer, verdict) in answers.into_iter().zip(verdicts) {
                    // Nobody may listen any more: the sender comes again and hears that it is known.
                    let _ = answer.send(Ok(verdict));
                }
            }
            // One of several spoiled the call: each is asked about alone.
            Err(error) if inbound.len() > 1 && is_of_one(&error) => {
                for (inbound, answer) in inbound.chunks(1).zip(answers) {
                    if answer.is_closed() {
                        continue;
                    }
                    let verdict = self.call(inbound).await.map(|verdicts| verdicts[0]);
                    let _ = answer.send(verdict.map_err(Arc::new));
                }
            }
            Err(error) => {
                let error = Arc::new(error);
                for answer in answers {
                    let _ = answer.send(Err(Arc::clone(&error)));
                }
            }
        }
    }

    /// One verdict for each message, or a failure.
    async fn call(&self, inbound: &[Inbound]) -> Result<Vec<Received>, Error> {
        let verdicts = tokio::select! {
            verdicts = self.receive.receive_many(&self.log, inbound) => verdicts?,
            () = self.clock.sleep(self.timeout) => return Err(too_slow()),
        };
        if verdicts.len() != inbound.len() {
            return Err(Error::new(
                ErrorKind::Internal,
                "receive",
                "store_protocol",
                "the store's answer has another length",
            ));
        }
        Ok(verdicts)
    }
}

fn too_slow() -> Error {
    Error::new(ErrorKind::Unavailable, "receive", "store_timeout", "the store did not answer in time")
}

/// The call that had the message panicked.
fn broken_off() -> Error {
    let text = "the call that stored this message broke off; this is a defect";
    Error::new(ErrorKind::Internal, "receive", "receive_broken_off", text)
}

/// Whether a failure may be about a single message; otherwise the store is away, busy or not set up. Contention is: somebody holds one message.
fn is_of_one(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Conflict | ErrorKind::Internal)
        || error.code() == "store_contention"
}

impl Waiting {
    /// Lets go of messages that nobody waits for any more, once there are twice as many as at the last time.
    fn sweep(&mut self) {
        if self.messages.len() >= self.swept_at.max(2 * MESSAGES_MAX) {
            self.messages.retain(|message| !message.answer.is_closed());
            self.swept_at = 2 * self.messages.len();
        }
    }
}

/// What a message that has come finds.
enum Turn {
    /// Every place is taken: whoever has one takes the message along.
    Waits,
    /// Nobody else is there.
    Alone(Flight),
    /// Others are on their way, or were a moment ago.
    InCompany(Flight),
}

/// A place among the calls under way.
struct Flight {
    gather: Arc<Gather>,
    landed: bool,
}

impl Flight {
    /// Stores until nothing waits.
    async fn fly(mut self) {
        loop {
            // What the runtime has at hand comes first, requests that are being read among it: they come along instead of each taking a
            // call of its own. It is not a wait.
            tokio::task::yield_now().await;
            if !self.leg().await {
                return;
            }
        }
    }

    /// Stores what waits now, and leaves to another task what has come meanwhile.
    async fn hop(mut self) {
        if self.leg().await && !self.land() {
            tokio::spawn(self.fly());
        }
    }

    /// One call. Returns whether the place is still taken: there was something to store.
    async fn leg(&mut self) -> bool {
        let Some(messages) = self.board() else { return false };
        // A panic in the store is the end of its messages, whose answers are dropped, and of nothing else.
        let _ = AssertUnwindSafe(self.gather.store_all(messages)).catch_unwind().await;
        true
    }

    /// Gives up the place, unless something waits.
    fn land(&mut self) -> bool {
        let mut waiting = self.gather.waiting();
        self.landed = waiting.messages.is_empty();
        waiting.flights -= usize::from(self.landed);
        self.landed
    }

    /// What the next call takes. `None`: nothing waits, and the place is free.
    fn board(&mut self) -> Option<Vec<Message>> {
        let mut waiting = self.gather.waiting();
        let mut boarded: Vec<Message> = Vec::new();
        let mut bytes = 0;
        while boarded.len() < MESSAGES_MAX && bytes < BYTES_MAX {
            let Some(message) = waiting.messages.pop_front() else { break };
            // Whose sender has gone need not be stored: it was promised nothing, and comes again.
            if !message.answer.is_closed() {
                bytes += message.inbound.event.payload.len();
                boarded.push(message);
            }
        }
        if boarded.is_empty() {
            // Under the same lock: whoever comes next finds the place free.
            waiting.flights -= 1;
            self.landed = true;
            return None;
        }
        waiting.crowded = boarded.len() > 1;
        Some(boarded)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        // Its runtime has ended; the next one begins anew.
        if !self.landed {
            self.gather.waiting().flights -= 1;
        }
    }
}

/// A call in its sender's own task, which saves waking another one. It may have taken others along, and a connection's transaction must not be cut in two:
/// if the sender hangs up, it goes on in a task of its own.
struct Carried(Option<BoxFuture<'static, ()>>);

impl Carried {
    fn new(call: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(Some(Box::pin(call)))
    }
}

impl Future for Carried {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if let Some(call) = &mut self.0 {
            ready!(call.poll_unpin(context));
            self.0 = None;
        }
        Poll::Ready(())
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        // Without a runtime everything ends.
        if let (Some(call), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(call);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use futures::future::join_all;
    use postbox_core::NewEvent;
    use postbox_testkit::clock::ManualClock;
    use tokio::sync::Semaphore;
    use tokio::task::JoinHandle;

    use super::*;

    /// A store whose calls each wait for leave, and that dislikes some words.
    struct Gated {
        leave: Semaphore,
        /// What each call brought, when it came.
        calls: Mutex<Vec<Vec<String>>>,
        called: tokio::sync::Notify,
        answered: AtomicUsize,
    }

    #[async_trait]
    impl Receive for Gated {
        async fn receive_many(&self, _log: &LogName, inbound: &[Inbound]) -> postbox_core::Result<Vec<Received>> {
            let ids: Vec<String> = inbound.iter().map(|message| message.message_id.clone()).collect();
            self.calls.lock().expect("no panic while held").push(ids.clone());
            self.called.notify_one();
            self.leave.acquire().await.expect("never closed").forget();
            let has = |word: &str| ids.iter().any(|id| id == word);
            assert!(!has("panic"), "on purpose");
            if has("away") {
                return Err(Error::new(ErrorKind::Unavailable, "receive", "store_unreachable", "it is away"));
            }
            if has("bad") {
                return Err(Error::invalid("receive", "text_invalid", "the database does not like it"));
            }
            self.answered.fetch_add(1, Ordering::Relaxed);
            let id = "00000000-0000-7000-8000-000000000000".parse().expect("well-formed");
            Ok(ids.iter().map(|_| Received::Accepted(id)).collect())
        }

        async fn forget(&self, _older_than: Duration) -> postbox_core::Result<u64> {
            Ok(0)
        }
    }

    impl Gated {
        /// Until so many calls have come.
        async fn calls(&self, count: usize) -> Vec<Vec<String>> {
            loop {
                let calls = self.calls.lock().expect("no panic while held").clone();
                if calls.len() >= count {
                    return calls;
                }
                self.called.notified().await;
            }
        }
    }

    const TIMEOUT: Duration = Duration::from_secs(600);

    fn gather() -> (Arc<Gated>, Arc<Gather>) {
        gather_by(Arc::new(ManualClock::default()))
    }

    fn gather_by(clock: Arc<ManualClock>) -> (Arc<Gated>, Arc<Gather>) {
        let calls = Mutex::default();
        let (called, answered) = (tokio::sync::Notify::new(), AtomicUsize::new(0));
        let store = Arc::new(Gated { leave: Semaphore::new(0), calls, called, answered });
        let gather = Gather::new(Arc::clone(&store) as _, clock, LogName::inbox(), TIMEOUT);
        (store, gather)
    }

    fn message(id: &str, bytes: usize) -> Inbound {
        Inbound {
            source: "hooks".parse().expect("well-formed"),
            message_id: id.to_owned(),
            digest: [0; 32],
            event: NewEvent::new("topic", vec![0; bytes], "application/octet-stream"),
        }
    }

    /// Sends each; all have arrived when this returns. The runtime of these tests has one thread.
    async fn send(gather: &Arc<Gather>, ids: &[&str], bytes: usize) -> Vec<JoinHandle<Verdict>> {
        let mut sent = Vec::new();
        for id in ids {
            let (gather, message) = (Arc::clone(gather), message(id, bytes));
            sent.push(tokio::spawn(async move { gather.store(message).await }));
        }
        tokio::task::yield_now().await;
        sent
    }

    /// Two calls that wait for leave, as many as there may be.
    async fn occupy(store: &Gated, gather: &Arc<Gather>) -> Vec<JoinHandle<Verdict>> {
        let mut sent = send(gather, &["1"], 10).await;
        store.calls(1).await;
        sent.extend(send(gather, &["2"], 10).await);
        assert_eq!(store.calls(2).await, [["1"], ["2"]], "each left at once, alone");
        sent
    }

    /// Until no call is under way.
    async fn landed(gather: &Gather) {
        while gather.waiting().flights > 0 {
            tokio::task::yield_now().await;
        }
    }

    async fn codes(sent: Vec<JoinHandle<Verdict>>) -> Vec<String> {
        let told = |verdict: Verdict| verdict.map_or_else(|error| error.code().to_owned(), |_| "accepted".to_owned());
        join_all(sent).await.into_iter().map(|verdict| told(verdict.expect("no panic"))).collect()
    }

    #[tokio::test]
    async fn what_arrives_while_calls_are_under_way_goes_together() {
        let (store, gather) = gather();
        let mut sent = occupy(&store, &gather).await;
        sent.extend(send(&gather, &["3", "4", "5"], 10).await);
        store.leave.add_permits(3);
        assert_eq!(codes(sent).await, ["accepted"; 5]);
        assert_eq!(store.calls(3).await[2], ["3", "4", "5"]);
        landed(&gather).await;
    }

    #[tokio::test]
    async fn what_arrives_at_once_goes_together() {
        let (store, gather) = gather();
        let sent = send(&gather, &["1", "2", "3", "4"], 10).await;
        assert_eq!(store.calls(2).await, [&["1"][..], &["2", "3", "4"]], "the first could not know of the others");
        store.leave.add_permits(2);
        assert_eq!(codes(sent).await, ["accepted"; 4]);
        landed(&gather).await;
        let sent = send(&gather, &["5", "6", "7"], 10).await;
        assert_eq!(store.calls(3).await[2], ["5", "6", "7"], "this time it could");
        store.leave.add_permits(1);
        assert_eq!(codes(sent).await, ["accepted"; 3]);
    }

    #[tokio::test]
    async fn who_is_alone_again_is_stored_by_his_own_task() {
        let (store, gather) = gather();
        let sent = send(&gather, &["1", "2", "3"], 10).await;
        store.leave.add_permits(4);
        codes(sent).await;
        for crowded in [true, false] {
            landed(&gather).await;
            assert_eq!(gather.waiting().crowded, crowded);
            codes(send(&gather, &["4"], 10).await).await;
        }
    }

    #[tokio::test]
    async fn a_call_outlives_the_sender_whose_task_it_was() {
        let (store, gather) = gather();
        let sent = send(&gather, &["1"], 10).await;
        store.calls(1).await;
        sent.into_iter().for_each(|sender| sender.abort());
        store.leave.add_permits(1);
        landed(&gather).await;
        assert_eq!(store.answered.load(Ordering::Relaxed), 1, "not broken off");
    }

    #[tokio::test]
    async fn a_call_takes_so_much_and_no_more() {
        let (store, gather) = gather();
        let ids: Vec<String> = (0..MESSAGES_MAX + 12).map(|n| n.to_string()).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let sent = send(&gather, &ids, 10).await;
        store.leave.add_permits(100);
        codes(sent).await;
        let sizes: Vec<usize> = store.calls(3).await.iter().map(Vec::len).collect();
        assert_eq!(sizes, [1, MESSAGES_MAX, 11]);
        codes(send(&gather, &["a", "b", "c", "d", "e"], BYTES_MAX).await).await;
        assert!(store.calls(8).await[3..].iter().all(|call| call.len() == 1));
    }

    #[tokio::test]
    async fn a_bad_message_is_its_senders_trouble_only() {
        let (store, gather) = gather();
        let sent = send(&gather, &["1", "2", "3", "bad", "5"], 10).await;
        store.leave.add_permits(100);
        assert_eq!(codes(sent).await, ["accepted", "accepted", "accepted", "text_invalid", "accepted"]);
        assert_eq!(store.calls(2).await[1].len(), 4, "they went together");
    }

    #[tokio::test]
    async fn a_store_that_is_away_is_asked_once_for_all() {
        let (store, gather) = gather();
        let sent = send(&gather, &["1", "2", "3", "away", "5"], 10).await;
        store.leave.add_permits(100);
        assert_eq!(codes(sent).await[1..], ["store_unreachable"; 4]);
        assert_eq!(store.calls(2).await.len(), 2, "the first, and the others");
    }

    #[tokio::test]
    async fn senders_that_hang_up_hold_up_nobody() {
        let (store, gather) = gather();
        let mut sent = occupy(&store, &gather).await;
        sent.extend(send(&gather, &["3", "4"], 10).await);
        for gone in [2, 1, 0] {
            sent.remove(gone).abort();
        }
        store.leave.add_permits(3);
        assert_eq!(codes(sent).await, ["accepted"]);
        assert_eq!(store.calls(3).await[2], ["4"], "the third was not worth a call any more");
    }

    #[tokio::test]
    async fn calls_that_hang_end_and_the_next_are_made() {
        let clock = Arc::new(ManualClock::default());
        let (store, gather) = gather_by(Arc::clone(&clock));
        let mut sent = occupy(&store, &gather).await;
        clock.advance(TIMEOUT / 2);
        sent.extend(send(&gather, &["3"], 10).await);
        clock.advance(TIMEOUT / 2);
        assert_eq!(store.calls(3).await[2], ["3"]);
        store.leave.add_permits(1);
        assert_eq!(codes(sent).await, ["store_timeout", "store_timeout", "accepted"]);
    }

    #[tokio::test]
    async fn nobody_waits_for_a_call_longer_than_a_call_may_take() {
        let clock = Arc::new(ManualClock::default());
        let (store, gather) = gather_by(Arc::clone(&clock));
        let mut sent = occupy(&store, &gather).await;
        sent.extend(send(&gather, &["3"], 10).await);
        clock.advance(TIMEOUT);
        assert_eq!(codes(sent).await, ["store_timeout"; 3]);
        landed(&gather).await;
        assert_eq!(store.calls(2).await.len(), 2, "its sender has been answered");
    }

    #[tokio::test]
    async fn who_hangs_up_leaves_nothing_behind() {
        let (store, gather) = gather();
        let sent = occupy(&store, &gather).await;
        for _ in 0..10 * MESSAGES_MAX {
            send(&gather, &["gone"], 10).await.remove(0).abort();
            tokio::task::yield_now().await;
        }
        assert!(gather.waiting().messages.len() <= 2 * MESSAGES_MAX);
        store.leave.add_permits(2);
        assert_eq!(codes(sent).await, ["accepted"; 2]);
    }

    #[test]
    fn a_runtime_that_ends_leaves_its_places_to_the_next() {
        let runtime = || tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let (store, gather) = gather();
        runtime().block_on(async {
            send(&gather, &["1", "2"], 10).await;
        });
        store.leave.add_permits(1);
        runtime().block_on(async {
            assert_eq!(codes(send(&gather, &["3"], 10).await).await, ["accepted"]);
            landed(&gather).await;
        });
    }

    #[tokio::test]
    async fn a_panic_in_the_store_wedges_nobody() {
        let (store, gather) = gather();
        let mut sent = occupy(&store, &gather).await;
        sent.extend(send(&gather, &["3", "panic"], 10).await);
        store.leave.add_permits(100);
        assert_eq!(codes(sent).await, ["accepted", "accepted", "receive_broken_off", "receive_broken_off"]);
        let later = send(&gather, &["5", "6", "7"], 10).await;
        assert_eq!(codes(later).await, ["accepted"; 3]);
        landed(&gather).await;
    }
}
