//! SNS from the request to the answer, against a scripted AWS.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use futures::future::{BoxFuture, join_all};
use http::{Request, StatusCode};
use jiff::Timestamp;
use postbox_core::{Clock as _, LogName, SourceName};
use postbox_http::Fetched;
use postbox_testkit::clock::ManualClock;
use postbox_testkit::inbox::Inbox;
use postbox_webhook::sns::{TopicArn, Verifier};
use tokio::task::JoinHandle;
use tower::ServiceExt;

use super::certificates::Certificates;
use super::{FETCH_TIMEOUT, Fetch, SnsClient};
use crate::{Ingress, WebhookSource, router};

/// Messages and their certificate, signed with openssl; see the generator in that folder.
const MESSAGES: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../webhook/tests/fixtures/sns/messages.json"));
const SIGNING: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../webhook/tests/fixtures/sns/signing.pem"));
const TOPIC: &str = "arn:aws:sns:eu-central-1:123456789012:orders";
const CERTIFICATE: &str = "SimpleNotificationService-0123456789abcdef0123456789abcdef";
/// 2030-01-01T00:00:00Z, the time of every message.
const NOW_S: i64 = 1_893_456_000;

/// How the scripted AWS behaves.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Works,
    Down,
    Refuses,
    SaysNonsense,
    /// It never answers.
    Hangs,
}

struct Aws {
    mode: Mutex<Mode>,
    asked: Mutex<Vec<String>>,
}

impl Fetch for Aws {
    fn get(&self, url: String) -> BoxFuture<'_, Fetched> {
        self.asked.lock().expect("no panic").push(url.clone());
        let mode = *self.mode.lock().expect("no panic");
        Box::pin(async move {
            // Lets other messages arrive meanwhile.
            tokio::task::yield_now().await;
            match mode {
                Mode::Hangs => std::future::pending().await,
                Mode::Works if url.ends_with(".pem") && !url.contains(CERTIFICATE) => Fetched::Refused("404".into()),
                Mode::Works => Fetched::Body(Bytes::from_static(SIGNING)),
                Mode::Down => Fetched::Failed("503".into()),
                Mode::Refuses => Fetched::Refused("404".into()),
                Mode::SaysNonsense => Fetched::Body(Bytes::from_static(b"<html>")),
            }
        })
    }
}

struct Stand {
    aws: Arc<Aws>,
    clock: Arc<ManualClock>,
    inbox: Arc<Inbox>,
    ingress: Arc<Ingress>,
    router: Router,
}

impl Stand {
    fn new(confirm: bool) -> Self {
        Self::with(confirm, SnsClient::default())
    }

    fn with(confirm: bool, client: SnsClient) -> Self {
        let aws = Arc::new(Aws { mode: Mutex::new(Mode::Works), asked: Mutex::default() });
        let certificates = Certificates::new(aws.clone(), client.askers_max);
        let client = SnsClient { certificates: Arc::new(OnceLock::from(certificates)), ..client };
        let sources = ["aws", "aws-2"].map(|name| {
            let verifier = Verifier::new([TopicArn::parse(TOPIC).expect("a topic")]).expect("a verifier");
            let name = SourceName::new(name).expect("a name");
            WebhookSource::sns(name, LogName::inbox(), verifier, confirm, &client).expect("a source")
        });
        let clock = Arc::new(ManualClock::new(Timestamp::from_second(NOW_S).expect("a time")));
        let inbox = Arc::new(Inbox::default());
        let ingress = Ingress::new(sources.into(), inbox.clone(), clock.clone()).expect("an ingress");
        Self { aws, clock, inbox, router: router(Arc::clone(&ingress)), ingress }
    }

    fn set(&self, mode: Mode) {
        *self.aws.mode.lock().expect("no panic") = mode;
    }

    fn asked(&self) -> Vec<String> {
        self.aws.asked.lock().expect("no panic").clone()
    }

    async fn post(&self, body: String) -> (u16, String) {
        Self::post_to(self.router.clone(), "aws", body).await
    }

    /// Posts in a separate task.
    fn spawn(&self, body: String) -> JoinHandle<(u16, String)> {
        self.spawn_to("aws", body)
    }

    fn spawn_to(&self, source: &'static str, body: String) -> JoinHandle<(u16, String)> {
        tokio::spawn(Self::post_to(self.router.clone(), source, body))
    }

    async fn post_to(router: Router, source: &str, body: String) -> (u16, String) {
        let request = Request::post(format!("/in/{source}")).header("content-type", "text/plain; charset=UTF-8");
        let answer = router.oneshot(request.body(Body::from(body)).expect("a request")).await;
        let answer = answer.expect("an answer");
        let status = answer.status();
        assert_eq!(answer.headers().contains_key("retry-after"), status == StatusCode::SERVICE_UNAVAILABLE);
        let text = axum::body::to_bytes(answer.into_body(), 4_096).await.expect("a body");
        (status.as_u16(), String::from_utf8_lossy(&text).into_owned())
    }

    fn count(&self, code: &str) -> u64 {
        self.ingress.counts().iter().filter(|count| count.code == code).map(|count| count.count).sum()
    }
}

fn fixture(name: &str) -> String {
    let cases: Vec<BTreeMap<String, String>> = serde_json::from_str(MESSAGES).expect("JSON");
    let case = cases.into_iter().find(|case| case["name"] == name).expect("a case of that name");
    case["body"].clone()
}

fn is(answer: &(u16, String), status: u16, text: &str) {
    assert_eq!((answer.0, answer.1.as_str()), (status, text));
}

#[tokio::test]
async fn a_notification_is_stored_once_and_a_crowd_costs_one_certificate() {
    let stand = Stand::new(false);
    let answers = join_all((0..50).map(|_| stand.post(fixture("notification")))).await;
    assert!(answers.iter().all(|(status, _)| *status == 202 || *status == 200), "{answers:?}");
    assert_eq!((stand.count("accepted"), stand.count("duplicate")), (1, 49));
    assert_eq!(stand.asked().len(), 1);
    assert_eq!(stand.inbox.all()[0].event.content_type, None, "JSON, although it came as text/plain");
    // The same id with another text: a conflict, and as genuine as the first.
    is(&stand.post(fixture("notification of an empty text")).await, 200, "conflict");
    assert_eq!(stand.asked().len(), 1);
}

#[tokio::test]
async fn what_is_not_genuine_leaves_no_trace_and_asks_nobody_but_aws() {
    let stand = Stand::new(true);
    let genuine = fixture("notification");
    let host = "https://sns.eu-central-1.amazonaws.com/";
    for (body, code, asked) in [
        (genuine.replace(":orders", ":others"), "topic_not_allowed", 0),
        (genuine.replace(host, "https://sns.eu-central-1.amazonaws.com.evil.example/"), "certificate_url_refused", 0),
        (genuine.replace(host, "https://127.0.0.1/"), "certificate_url_refused", 0),
        (fixture("version 1"), "signature_version_outdated", 0),
        ("{}".into(), "signature_missing", 0),
        (genuine.replace("Hello!", "Hello?"), "signature_mismatch", 1),
        (fixture("subscription").replace("You have", "You may have"), "signature_mismatch", 1),
    ] {
        let before = stand.count(code);
        is(&stand.post(body).await, 401, "unverified");
        assert_eq!((stand.count(code), stand.asked().len()), (before + 1, asked), "{code}");
    }
    // AWS, or somebody on the way there, does not have it.
    is(&stand.post(genuine.replace(CERTIFICATE, "Another")).await, 503, "certificate_unavailable");
    assert_eq!(stand.asked().len(), 2);
    assert!(stand.asked().iter().all(|url| url.starts_with(host) && url.ends_with(".pem")), "{:?}", stand.asked());
    is(&stand.post(genuine).await, 202, "accepted");
}

#[tokio::test]
async fn without_the_certificate_the_sender_comes_again() {
    let stand = Stand::new(false);
    stand.set(Mode::Down);
    is(&stand.post(fixture("notification")).await, 503, "certificate_unavailable");
    for mode in [Mode::Refuses, Mode::SaysNonsense] {
        stand.set(mode);
        is(&stand.post(fixture("notification")).await, 503, "certificate_unavailable");
        // Not fetched again for a minute, even if AWS has it now.
        stand.set(Mode::Works);
        let asked = stand.asked().len();
        is(&stand.post(fixture("notification")).await, 503, "certificate_unavailable");
        assert_eq!(stand.asked().len(), asked);
        stand.clock.advance(Duration::from_secs(60));
    }
    is(&stand.post(fixture("notification")).await, 202, "accepted");
}

/// SNS repeats a message after 429 and 5xx only. What is wrong for now must not be lost.
#[tokio::test]
async fn what_may_be_right_later_comes_again() {
    let stand = Stand::new(false);
    is(&stand.post(fixture("notification")).await, 202, "accepted");
    let large = format!("{}{}", fixture("notification"), " ".repeat(2_000_000));
    is(&stand.post(large).await, 503, "body_too_large");
    // Our clock is wrong.
    stand.clock.advance(Duration::from_secs(2 * 3_600));
    is(&stand.post(fixture("notification")).await, 503, "unverified");
    assert_eq!(stand.count("timestamp_too_old"), 1);
}

/// They cannot be evicted while a certificate is fetched, so they must not take every connection,
/// however many sources they go to.
#[tokio::test]
async fn few_messages_wait_for_fetches_that_do_not_end() {
    for (connections, names) in [(512, 16), (512, 1_000), (64, 16), (64, 1_000), (16, 1_000), (4, 1_000)] {
        let stand = Stand::with(false, SnsClient::for_connections(connections));
        stand.set(Mode::Hangs);
        let forge = |number: usize| {
            stand.spawn_to(["aws", "aws-2"][number / 16 % 2], forged(&format!("Guess-{}", number % names)))
        };
        let posts: Vec<_> = (0..1_000).map(forge).collect();
        for _ in 0..100 {
            settle().await;
            // More fetches may begin.
            stand.clock.advance(Duration::from_millis(10));
        }
        let waiting = posts.iter().filter(|post| !post.is_finished()).count();
        assert!((1..=connections / 2).contains(&waiting), "{waiting} of 1,000 wait, with {connections} connections");
        posts.iter().for_each(JoinHandle::abort);
    }
}

/// Their certificate is fetched all the same, so the next repetition finds it.
#[tokio::test]
async fn with_few_connections_a_genuine_message_gets_through_among_forged_ones() {
    let stand = Stand::with(false, SnsClient::for_connections(16));
    stand.set(Mode::Hangs);
    let posts: Vec<_> = (0..100).map(|number| stand.spawn(forged(&format!("Guess-{number}")))).collect();
    settle().await;
    stand.set(Mode::Works);
    let first = stand.spawn(fixture("notification"));
    settle().await;
    stand.clock.advance(FETCH_TIMEOUT);
    settle().await;
    posts.iter().for_each(JoinHandle::abort);
    if first.await.expect("no panic").0 != 202 {
        is(&stand.post(fixture("notification")).await, 202, "accepted");
    }
}

fn forged(name: &str) -> String {
    fixture("notification").replace(CERTIFICATE, name)
}

/// Lets every task make progress at this moment.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn strangers_cannot_make_us_ask_aws_for_ever() {
    let stand = Stand::new(false);
    is(&stand.post(fixture("notification")).await, 202, "accepted");
    let posts: Vec<_> = (0..1_000).map(|number| stand.spawn(forged(&format!("Guess-{number}")))).collect();
    settle().await;
    assert!(stand.asked().len() <= 12, "{} requests at once", stand.asked().len());
    for second in 1..=10 {
        for _ in 0..50 {
            stand.clock.advance(Duration::from_millis(20));
            settle().await;
        }
        assert!(stand.asked().len() <= 12 + 50 * second, "{} requests in {second} s", stand.asked().len());
    }
    // Most were refused at once, and the rest have been answered by now.
    for post in posts {
        assert!(post.is_finished());
        is(&post.await.expect("no panic"), 503, "certificate_unavailable");
    }
    is(&stand.post(fixture("notification")).await, 200, "duplicate");
    // One name, a thousand times: one fetch.
    let before = stand.asked().len();
    for _ in 0..1_000 {
        is(&stand.post(forged("Again")).await, 503, "certificate_unavailable");
    }
    assert_eq!(stand.asked().len(), before + 1);
}

/// A forger's strategy at 200 requests a second: the name of the certificate in request n.
type Forger = fn(u64) -> u64;

/// The number of attempts that a genuine sender needs. It begins `head_start` requests after the
/// forger and repeats 20 s after each refusal, as SNS does.
async fn attempts(forger: Forger, head_start: u64) -> u32 {
    let stand = Stand::new(false);
    let (mut attempts, mut again_at) = (0, head_start);
    let mut genuine: Option<JoinHandle<(u16, String)>> = None;
    for tick in 0.. {
        drop(stand.spawn(forged(&format!("Forged-{}", forger(tick)))));
        if genuine.as_ref().is_some_and(JoinHandle::is_finished) {
            match genuine.take().expect("it is there").await.expect("no panic").0 {
                202 => break,
                503 => again_at = tick + 200 * 20,
                other => panic!("a genuine message was answered {other}"),
            }
        } else if genuine.is_none() && tick >= again_at {
            attempts += 1;
            genuine = Some(stand.spawn(fixture("notification")));
        }
        settle().await;
        stand.clock.advance(Duration::from_millis(5));
        assert!(attempts <= 20, "forgers keep it out");
    }
    let seconds = stand.clock.monotonic().as_secs_f64();
    assert!(stand.asked().len() as f64 <= 15.0 + 50.0 * seconds, "{} requests in {seconds} s", stand.asked().len());
    attempts
}

#[tokio::test]
async fn forged_certificates_do_not_keep_a_genuine_message_out() {
    // A new name each time; each name 2, 3, 4 and 10 times in a row; ten names in turn.
    let forgers: [(Forger, u32); 6] =
        [(|n| n, 2), (|n| n / 2, 3), (|n| n / 3, 4), (|n| n / 4, 4), (|n| n / 10, 4), (|n| n / 2_000 * 10 + n % 10, 4)];
    for (number, (forger, most)) in forgers.into_iter().enumerate() {
        let needed = attempts(forger, 2_000).await;
        assert!(needed <= most, "forger {number}: {needed} attempts");
    }
}

#[tokio::test]
async fn a_certificate_that_was_needed_is_not_given_up_for_others() {
    let stand = Stand::new(false);
    is(&stand.post(fixture("notification")).await, 202, "accepted");
    // Certificates that exist, such as those of other AWS regions, but verify nothing that a
    // stranger can send.
    for number in 0..150 {
        let region = format!("https://sns.{}-west-{}.amazonaws.com/", ["eu", "us"][number / 100], number % 100);
        let body = fixture("notification").replace("https://sns.eu-central-1.amazonaws.com/", &region);
        is(&stand.post(body.replace("Hello!", "Hello?")).await, 401, "unverified");
        stand.clock.advance(Duration::from_secs(1));
    }
    let asked = stand.asked().len();
    assert_eq!(asked, 151);
    is(&stand.post(fixture("notification")).await, 200, "duplicate");
    assert_eq!(stand.asked().len(), asked);
}

#[tokio::test]
async fn another_spelling_of_the_json_is_the_same_message() {
    let stand = Stand::new(false);
    is(&stand.post(fixture("notification")).await, 202, "accepted");
    for spaces in 1..50 {
        is(&stand.post(fixture("notification") + &" ".repeat(spaces)).await, 200, "duplicate");
    }
    let more =
        fixture("notification").replacen('{', r#"{"MessageAttributes":{"shop":{"Type":"String","Value":"x"}},"#, 1);
    is(&stand.post(more).await, 200, "duplicate");
    assert_eq!((stand.count("conflict"), stand.count("duplicate")), (0, 50));
}

#[tokio::test]
async fn a_subscription_is_confirmed_if_the_configuration_says_so() {
    let stand = Stand::new(false);
    is(&stand.post(fixture("subscription")).await, 200, "unconfirmed");
    is(&stand.post(fixture("unsubscription")).await, 200, "unsubscribed");
    assert_eq!(stand.asked().len(), 1, "only the certificate");

    let stand = Stand::new(true);
    is(&stand.post(fixture("notification")).await, 202, "accepted");
    stand.set(Mode::Down);
    is(&stand.post(fixture("subscription")).await, 503, "confirmation_failed");
    stand.set(Mode::Works);
    is(&stand.post(fixture("subscription")).await, 200, "confirmed");
    is(&stand.post(fixture("unsubscription")).await, 200, "unsubscribed");
    let asked = stand.asked();
    assert_eq!(asked.len(), 3, "the certificate, and twice the confirmation; nothing for the unsubscription");
    assert!(asked[2].contains("Action=ConfirmSubscription"));
    assert_eq!(stand.count("accepted"), 1);
}

/// A complete body that waits for a certificate can be dropped like one that does not end.
#[tokio::test]
async fn forgeries_that_wait_for_certificates_do_not_hold_the_buffer() {
    let stand = Stand::new(false);
    is(&stand.post(fixture("notification")).await, 202, "accepted");
    // Unsigned white space up to the largest body, in more messages than the buffer holds, and the
    // clock stands still.
    let large = |name: &str| format!("{}{}", forged(name), " ".repeat(1_000_000));
    let posts: Vec<_> = (0..60).map(|number| stand.spawn(large(&format!("Guess-{number}")))).collect();
    settle().await;
    is(&stand.post(fixture("notification")).await, 200, "duplicate");
    assert!(stand.count("body_pushed_out") > 0 && stand.count("busy") == 0, "{:?}", stand.ingress.counts());
    posts.iter().for_each(JoinHandle::abort);
}
