//! The receiving suite for webhooks, with senders that repeat until they get a final answer.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use http::{Request, StatusCode};
use postbox_core::{LogName, SourceName};
use postbox_ingress::{Ingress, Origin, SourceLimits, WebhookSource, router};
use postbox_testkit::clock::StillClock;
use postbox_testkit::conformance::{Poison, ReceivingFixture, ReceivingTraits};
use postbox_testkit::inbox::Inbox;
use postbox_webhook::standard::{SignKey, Signer};
use postbox_webhook::{Scheme, Settings, UnixSeconds, verifier};
use tokio::sync::{Notify, watch};
use tower::ServiceExt as _;

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
/// The time on the test clock.
const NOW_S: i64 = 1_767_225_600;
const IN_FLIGHT_MAX: usize = 8;
/// How long a sender waits before it repeats.
const AGAIN: Duration = Duration::from_millis(2);

struct Senders {
    inbox: Arc<Inbox>,
    shared: Arc<Shared>,
}

struct Shared {
    router: Router,
    /// Whether the ingress serves requests.
    started: watch::Sender<bool>,
    /// Breaks all connections.
    broken: Notify,
    answers_lost: AtomicBool,
    settled: AtomicUsize,
    refused: AtomicUsize,
    tasks: Mutex<tokio::task::JoinSet<()>>,
}

async fn senders() -> Senders {
    let inbox = Arc::new(Inbox::default());
    let verifier = verifier(Scheme::StandardWebhooks, &[SECRET], &Settings::default()).expect("a verifier");
    let name = SourceName::new("hooks").expect("a name");
    let mut source = WebhookSource::new(name, LogName::inbox(), verifier);
    source.limits = SourceLimits { concurrency: IN_FLIGHT_MAX, ..SourceLimits::default() };
    source.mapping.topic = vec![Origin::Header("x-topic".into())];
    let ingress = Ingress::new(vec![source], inbox.clone(), Arc::new(StillClock)).expect("an ingress");
    let shared = Shared {
        router: router(ingress),
        started: watch::Sender::new(false),
        broken: Notify::new(),
        answers_lost: AtomicBool::new(false),
        settled: AtomicUsize::new(0),
        refused: AtomicUsize::new(0),
        tasks: Mutex::default(),
    };
    Senders { inbox, shared: Arc::new(shared) }
}

impl Shared {
    /// Posts a message until it is accepted, a duplicate, or refused for good.
    async fn send(&self, id: String, body: String, topic: &'static str) {
        let signer = Signer::new([SignKey::parse(SECRET).expect("a key")]).expect("a signer");
        let signed = signer.sign(&id, UnixSeconds(NOW_S), body.as_bytes()).expect("signed");
        let mut started = self.started.subscribe();
        loop {
            started.wait_for(|started| *started).await.expect("the fixture lives");
            let request = Request::post("/in/hooks").header("x-topic", topic);
            let request =
                signed.headers().into_iter().fold(request, |request, (name, value)| request.header(name, value));
            let post = self.router.clone().oneshot(request.body(Body::from(body.clone())).expect("a request"));
            let status = tokio::select! {
                answer = post => answer.expect("an answer").status(),
                () = self.broken.notified() => continue,
                _ = started.wait_for(|started| !started) => continue,
            };
            match status {
                _ if self.answers_lost.load(Ordering::SeqCst) => {}
                StatusCode::OK | StatusCode::ACCEPTED => break,
                StatusCode::UNPROCESSABLE_ENTITY => {
                    self.refused.fetch_add(1, Ordering::SeqCst);
                    break;
                }
                other => assert_eq!(other, StatusCode::SERVICE_UNAVAILABLE),
            }
            tokio::time::sleep(AGAIN).await;
        }
        self.settled.fetch_add(1, Ordering::SeqCst);
    }
}

impl Senders {
    fn spawn(&self, id: &str, body: &str, topic: &'static str) {
        let (shared, id, body) = (Arc::clone(&self.shared), id.to_owned(), body.to_owned());
        let mut tasks = self.shared.tasks.lock().expect("no panic while held");
        tasks.spawn(async move { shared.send(id, body, topic).await });
    }
}

#[async_trait]
impl ReceivingFixture for Senders {
    fn traits(&self) -> ReceivingTraits {
        // Requests are independent: a sender that needs an order waits for each answer.
        ReceivingTraits { in_flight_max: IN_FLIGHT_MAX, ordered: false, poison: Poison::Refused }
    }

    fn inbox(&self) -> Arc<Inbox> {
        self.inbox.clone()
    }

    async fn start(&self) {
        self.shared.started.send_replace(true);
    }

    async fn stop(&self) {
        self.shared.started.send_replace(false);
    }

    fn publish(&self, id: &str, body: &str) {
        self.spawn(id, body, "order.paid");
    }

    fn publish_poison(&self, id: &str, body: &str) {
        self.spawn(id, body, "no topic");
    }

    async fn disconnect(&self) {
        self.shared.broken.notify_waiters();
    }

    fn lose_settlements(&self, lost: bool) {
        self.shared.answers_lost.store(lost, Ordering::SeqCst);
    }

    fn settled(&self) -> usize {
        self.shared.settled.load(Ordering::SeqCst)
    }

    fn refused(&self) -> usize {
        self.shared.refused.load(Ordering::SeqCst)
    }
}

postbox_testkit::receiving_suite!(senders);
