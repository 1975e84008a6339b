//! A receiver stores the next messages while it acknowledges the last ones at the source.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{AckToken, Error, ErrorKind, LogName, Result, Source, SourceCapabilities, SourceMessage};
use postbox_engine::TokioClock;
use postbox_memory::MemorySource;
use postbox_receiver::Receiver;
use postbox_testkit::inbox::Inbox;
use tokio_util::sync::CancellationToken;

use crate::source::{Mended, message, name, receive_while};

/// How long an acknowledgement takes, on the paused clock.
const HEARING: Duration = Duration::from_secs(1);

/// A queue whose acknowledgements are slow, and which counts concurrent ones.
struct Slow {
    queue: MemorySource,
    speaking: AtomicUsize,
    speaking_peak: AtomicUsize,
    calls: AtomicUsize,
}

impl Slow {
    fn new(in_flight_max: usize, ordered: bool) -> Arc<Self> {
        let queue = MemorySource::new(in_flight_max, Arc::new(TokioClock::new()));
        let queue = queue.with_capabilities(|capabilities| capabilities.ordered = ordered);
        let [speaking, speaking_peak, calls] = Default::default();
        Arc::new(Self { queue, speaking, speaking_peak, calls })
    }

    async fn hear(&self) {
        let speaking = self.speaking.fetch_add(1, Ordering::SeqCst) + 1;
        self.speaking_peak.fetch_max(speaking, Ordering::SeqCst);
        self.calls.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(HEARING).await;
        self.speaking.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl Source for Slow {
    fn capabilities(&self) -> SourceCapabilities {
        self.queue.capabilities()
    }

    async fn next(&self, max: usize) -> Result<Vec<SourceMessage>> {
        self.queue.next(max).await
    }

    async fn ack(&self, tokens: &[AckToken]) -> Result<()> {
        self.hear().await;
        self.queue.ack(tokens).await
    }

    async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()> {
        self.hear().await;
        self.queue.nak(tokens, delay).await
    }

    async fn reject(&self, tokens: &[AckToken]) -> Result<()> {
        self.hear().await;
        self.queue.reject(tokens).await
    }

    async fn close(&self) {
        self.queue.close().await;
    }
}

fn publish(source: &Slow, ids: std::ops::RangeInclusive<usize>) {
    ids.for_each(|id| source.queue.publish(message(&id.to_string(), "a")));
}

fn stored(inbox: &Inbox) -> Vec<String> {
    inbox.all().into_iter().map(|stored| stored.message_id).collect()
}

#[tokio::test(start_paused = true)]
async fn the_next_are_stored_while_the_last_are_acknowledged() {
    for ordered in [true, false] {
        let (source, inbox) = (Slow::new(32, ordered), Arc::new(Inbox::default()));
        let watch = async {
            publish(&source, 1..=24);
            tokio::time::sleep(HEARING / 2).await;
            assert_eq!(stored(&inbox).len(), 24, "in order: {ordered}");
            assert_eq!(source.queue.acked().len(), 0);
            tokio::time::sleep(2 * HEARING).await;
            assert_eq!(source.queue.acked().len(), 24);
        };
        receive_while(inbox.clone(), source.clone(), watch).await;
        assert_eq!(source.calls.load(Ordering::SeqCst), 2, "what was stored during the first call went together");
        assert_eq!(source.speaking_peak.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_stored_is_acknowledged_before_the_end() {
    let (source, inbox) = (Slow::new(32, true), Arc::new(Inbox::default()));
    let watch = async {
        publish(&source, 1..=24);
        tokio::time::sleep(HEARING / 2).await;
    };
    receive_while(inbox.clone(), source.clone(), watch).await;
    assert_eq!((stored(&inbox).len(), source.queue.acked().len()), (24, 24));
}

/// In order, messages that arrive while another is being given back must wait behind that one.
#[tokio::test(start_paused = true)]
async fn nothing_is_read_before_the_source_hears_of_what_comes_again() {
    let (source, store) = (Slow::new(32, true), Arc::new(Mended::default()));
    store.fails.notify_one();
    let watch = async {
        publish(&source, 1..=1);
        tokio::time::sleep(HEARING / 2).await;
        publish(&source, 2..=2);
        tokio::time::sleep(Duration::from_secs(60)).await;
    };
    receive_while(store.clone(), source.clone(), watch).await;
    assert_eq!(stored(&store.inbox), ["1", "2"]);
}

/// A queue without the right to acknowledge: what it delivered comes again at once.
struct Refusing(AtomicUsize);

#[async_trait]
impl Source for Refusing {
    fn capabilities(&self) -> SourceCapabilities {
        SourceCapabilities { in_flight_max: 32, ordered: true, nak_delay: true, dead_letters: false }
    }

    async fn next(&self, _max: usize) -> Result<Vec<SourceMessage>> {
        tokio::task::yield_now().await;
        Ok(vec![SourceMessage { message: message("1", "a"), token: AckToken(1) }])
    }

    async fn ack(&self, _tokens: &[AckToken]) -> Result<()> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Err(Error::new(ErrorKind::Unauthorized, "settle", "no_right", "it may not acknowledge"))
    }

    async fn nak(&self, tokens: &[AckToken], _delay: Duration) -> Result<()> {
        self.ack(tokens).await
    }

    async fn reject(&self, tokens: &[AckToken]) -> Result<()> {
        self.ack(tokens).await
    }

    async fn close(&self) {}
}

#[tokio::test(start_paused = true)]
async fn a_refused_acknowledgement_is_no_busy_loop() {
    let source = Arc::new(Refusing(AtomicUsize::new(0)));
    let watch = async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        let calls = source.0.load(Ordering::SeqCst);
        assert!((60..=260).contains(&calls), "{calls} calls in a minute");
    };
    receive_while(Arc::new(Inbox::default()), source.clone(), watch).await;
}

/// A broker's silent endpoint, as the source of SQS finds it.
struct Silent;

#[async_trait]
impl Source for Silent {
    fn capabilities(&self) -> SourceCapabilities {
        SourceCapabilities { in_flight_max: 32, ordered: true, nak_delay: true, dead_letters: false }
    }

    async fn next(&self, _max: usize) -> Result<Vec<SourceMessage>> {
        tokio::time::sleep(Duration::from_secs(30)).await;
        Err(Error::new(ErrorKind::Unavailable, "receive", "aws_timeout", "no answer in time"))
    }

    async fn ack(&self, _tokens: &[AckToken]) -> Result<()> {
        Ok(())
    }

    async fn nak(&self, _tokens: &[AckToken], _delay: Duration) -> Result<()> {
        Ok(())
    }

    async fn reject(&self, _tokens: &[AckToken]) -> Result<()> {
        Ok(())
    }

    async fn close(&self) {}
}

#[tokio::test(start_paused = true)]
async fn a_source_that_fails_slowly_does_not_count_as_back_in_between() {
    let clock = Arc::new(TokioClock::new());
    let receiver = Receiver::builder(Arc::new(Inbox::default()), name(), LogName::inbox(), clock);
    let receiver = receiver.pull(Arc::new(Silent)).build().expect("good settings");
    let stop = CancellationToken::new();
    let watch = async {
        tokio::time::sleep(Duration::from_secs(31)).await;
        for second in 0..120 {
            assert!(receiver.outage().is_some(), "after {second} s");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        stop.cancel();
    };
    tokio::join!(receiver.run(stop.clone()), watch);
}
