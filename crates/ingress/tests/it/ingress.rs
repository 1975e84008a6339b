//! The ingress: who is let in, what is stored, and what each sender is answered.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use futures::stream;
use http::{Request, StatusCode};
use postbox_core::{LogName, NewEvent, SourceName, Tenant};
use postbox_ingress::{Ingress, Origin, SourceLimits, WebhookSource};
use postbox_testkit::clock::StillClock;
use postbox_testkit::inbox::{Inbox, Mode};
use postbox_testkit::warnings::Warnings;
use postbox_webhook::standard::{SignKey, Signer};
use postbox_webhook::{Scheme, Settings, UnixSeconds, plain, verifier};
use tower::ServiceExt;

use crate::{DEADLINE, HOUR, NOW_S, SECRET};

pub(crate) const TEXT_SECRET: &str = "0123456789abcdef";

pub(crate) struct Stand {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) ingress: Arc<Ingress>,
    router: Router,
}

impl Stand {
    pub(crate) fn new(sources: Vec<WebhookSource>) -> Self {
        Self::bounded(sources, usize::MAX)
    }

    fn bounded(sources: Vec<WebhookSource>, storing_max: usize) -> Self {
        let inbox = Arc::new(Inbox::default());
        let ingress = Ingress::bounded(sources, inbox.clone(), Arc::new(StillClock), storing_max).unwrap();
        let router = postbox_ingress::router(Arc::clone(&ingress));
        Self { inbox, router: router.clone().nest("/t/{tenant}", router), ingress }
    }

    pub(crate) fn standard() -> Self {
        Self::new(vec![source("hooks", Scheme::StandardWebhooks)])
    }

    pub(crate) async fn post(&self, request: Request<Body>) -> (StatusCode, String) {
        let answer = tokio::time::timeout(DEADLINE, self.router.clone().oneshot(request)).await.expect("an answer");
        let answer = answer.unwrap();
        let status = answer.status();
        let again = [StatusCode::SERVICE_UNAVAILABLE, StatusCode::TOO_MANY_REQUESTS].contains(&status);
        assert_eq!(answer.headers().contains_key("retry-after"), again);
        let body = axum::body::to_bytes(answer.into_body(), 4096).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    pub(crate) fn count(&self, code: &str) -> u64 {
        self.ingress.counts().iter().filter(|count| count.code == code).map(|count| count.count).sum()
    }
}

pub(crate) fn source(name: &str, scheme: Scheme) -> WebhookSource {
    let secret = if scheme == Scheme::StandardWebhooks { SECRET } else { TEXT_SECRET };
    let settings = Settings { layout: Some(plain::Layout::new("x-sig")), ..Settings::default() };
    let verifier = verifier(scheme, &[secret], &settings).unwrap();
    WebhookSource::new(SourceName::new(name).unwrap(), LogName::inbox(), verifier)
}

pub(crate) fn signed(id: &str, body: &[u8]) -> http::request::Builder {
    let signer = Signer::new([SignKey::parse(SECRET).unwrap()]).unwrap();
    let signed = signer.sign(id, UnixSeconds(NOW_S), body).unwrap();
    let builder = Request::post("/in/hooks").header("content-type", "application/json");
    signed.headers().into_iter().fold(builder, |builder, (name, value)| builder.header(name, value))
}

pub(crate) fn message(id: &str, body: &'static str) -> Request<Body> {
    signed(id, body.as_bytes()).body(Body::from(body)).unwrap()
}

pub(crate) fn hex_mac(body: &[u8]) -> String {
    let key = plain::Secret::new(TEXT_SECRET).unwrap();
    plain::Signer::new(key, plain::Layout::new("s")).unwrap().sign(UnixSeconds(NOW_S), body).unwrap().remove(0).1
}

pub(crate) const ACCEPTED: (StatusCode, &str) = (StatusCode::ACCEPTED, "accepted");
pub(crate) const UNVERIFIED: (StatusCode, &str) = (StatusCode::UNAUTHORIZED, "unverified");

pub(crate) fn same(answer: &(StatusCode, String), expected: (StatusCode, &str)) {
    assert_eq!((answer.0, answer.1.as_str()), expected);
}

#[tokio::test]
async fn a_message_is_stored_once_and_every_repetition_succeeds() {
    let stand = Stand::standard();
    same(&stand.post(message("msg_1", r#"{"type":"a.b"}"#)).await, ACCEPTED);
    let below = signed("msg_1", br#"{"type":"a.b"}"#).uri("/t/acme/in/hooks");
    same(&stand.post(below.body(Body::from(r#"{"type":"a.b"}"#)).unwrap()).await, (StatusCode::OK, "duplicate"));
    same(&stand.post(message("msg_1", r#"{"type":"x.y"}"#)).await, (StatusCode::OK, "conflict"));
    let stored = stand.inbox.all();
    assert_eq!(stored.len(), 1);
    assert_eq!(stored[0].event.topic, "a.b");
    assert_eq!(&stored[0].event.payload[..], br#"{"type":"a.b"}"#);
    assert_eq!(stored[0].event.headers["postbox-message-id"], "msg_1");
    for (code, count) in [("accepted", 1), ("duplicate", 1), ("conflict", 1), ("signature_mismatch", 0)] {
        assert_eq!(stand.count(code), count, "{code}");
    }
}

#[tokio::test]
async fn nothing_unverified_leaves_a_trace() {
    let stand = Stand::standard();
    let body = r#"{"type":"a.b"}"#;
    let strip = |name: &str| {
        let mut request = message("msg_1", body);
        request.headers_mut().remove(name);
        request
    };
    let alter = |name: &'static str, value: &str| {
        let mut request = message("msg_1", body);
        request.headers_mut().insert(name, value.parse().unwrap());
        request
    };
    let mut twice = message("msg_1", body);
    twice.headers_mut().append("webhook-timestamp", (NOW_S + 1).to_string().parse().unwrap());
    let reserialised = signed("msg_1", body.as_bytes()).body(Body::from(r#"{"type": "a.b"}"#)).unwrap();
    for (request, code) in [
        (strip("webhook-id"), "id_missing"),
        (strip("webhook-timestamp"), "timestamp_missing"),
        (strip("webhook-signature"), "signature_missing"),
        (alter("webhook-id", "msg_2"), "signature_mismatch"),
        (alter("webhook-id", "a.b"), "id_malformed"),
        (alter("webhook-timestamp", "1e9"), "timestamp_malformed"),
        (alter("webhook-signature", "v1,"), "signature_malformed"),
        (alter("webhook-signature", "v0,AAAA"), "signature_version_unsupported"),
        (twice, "timestamp_duplicate"),
        (reserialised, "signature_mismatch"),
    ] {
        let before = stand.count(code);
        same(&stand.post(request).await, UNVERIFIED);
        assert_eq!(stand.count(code), before + 1, "{code}");
    }
    assert!(stand.inbox.all().is_empty());
    same(&stand.post(message("msg_1", body)).await, ACCEPTED);
}

#[tokio::test]
async fn a_stale_message_is_counted_as_such() {
    let stand = Stand::standard();
    for (age, code) in [(301, "timestamp_too_old"), (-301, "timestamp_too_new")] {
        let signer = Signer::new([SignKey::parse(SECRET).unwrap()]).unwrap();
        let signed = signer.sign("msg_1", UnixSeconds(NOW_S - age), b"{}").unwrap();
        let builder = Request::post("/in/hooks");
        let builder = signed.headers().into_iter().fold(builder, |builder, (name, value)| builder.header(name, value));
        same(&stand.post(builder.body(Body::from("{}")).unwrap()).await, UNVERIFIED);
        assert_eq!(stand.count(code), 1);
    }
}

#[tokio::test]
async fn guessed_ids_do_not_keep_the_genuine_message_out() {
    let stand = Stand::standard();
    for number in 0..10_000 {
        let mut forged = message("msg_guess", "{}");
        forged.headers_mut().insert("webhook-id", format!("msg_{number}").parse().unwrap());
        same(&stand.post(forged).await, UNVERIFIED);
    }
    for number in (0..10_000).step_by(997) {
        same(&stand.post(message(&format!("msg_{number}"), "{}")).await, ACCEPTED);
    }
}

#[tokio::test]
async fn one_of_many_at_once_is_accepted() {
    let stand = Stand::standard();
    let posts = (0..64).map(|_| stand.post(message("msg_1", "{}")));
    let answers = futures::future::join_all(posts).await;
    let accepted = answers.iter().filter(|(status, _)| *status == StatusCode::ACCEPTED).count();
    assert_eq!(accepted, 1);
    assert!(answers.iter().all(|(status, _)| status.is_success()));
}

#[tokio::test]
async fn what_is_no_request_is_refused_as_such() {
    let stand = Stand::standard();
    let request = |method: &str, path: &str| Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
    assert_eq!(stand.post(request("POST", "/in/nobody")).await.0, StatusCode::NOT_FOUND);
    assert_eq!(stand.count("source_unknown"), 1);
    assert_eq!(stand.post(request("POST", "/in/..%2f")).await.0, StatusCode::NOT_FOUND);
    assert_eq!(stand.post(request("GET", "/in/hooks")).await.0, StatusCode::METHOD_NOT_ALLOWED);
    for encoding in ["gzip", "br", "identity, gzip"] {
        let mut zipped = message("msg_1", "{}");
        zipped.headers_mut().insert("content-encoding", encoding.parse().unwrap());
        assert_eq!(stand.post(zipped).await.0, StatusCode::UNSUPPORTED_MEDIA_TYPE, "{encoding}");
    }
    let mut identity = message("msg_1", "{}");
    identity.headers_mut().insert("content-encoding", "identity".parse().unwrap());
    same(&stand.post(identity).await, ACCEPTED);
}

#[tokio::test]
async fn bodies_are_bounded_however_they_come() {
    let mut small = source("hooks", Scheme::StandardWebhooks);
    small.limits = SourceLimits { body_bytes: 100, ..SourceLimits::default() };
    let stand = Stand::new(vec![small]);
    let bodies = ["x".repeat(100), "x".repeat(101)];
    same(&stand.post(signed("at", bodies[0].as_bytes()).body(Body::from(bodies[0].clone())).unwrap()).await, ACCEPTED);
    // Declared too large.
    let announced =
        signed("over", bodies[1].as_bytes()).header("content-length", "101").body(Body::from(bodies[1].clone()));
    assert_eq!(stand.post(announced.unwrap()).await.0, StatusCode::PAYLOAD_TOO_LARGE);
    // Endless, without a length or with a false one.
    for length in [None, Some("10")] {
        let endless = stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from_static(b"0123456789")));
        let mut builder = signed("endless", b"");
        if let Some(length) = length {
            builder = builder.header("content-length", length);
        }
        let request = builder.body(Body::from_stream(endless)).unwrap();
        assert_eq!(stand.post(request).await.0, StatusCode::PAYLOAD_TOO_LARGE);
    }
    assert_eq!(stand.count("body_too_large"), 3);
    // Broken off.
    let broken = stream::iter([Ok(Bytes::from_static(b"x")), Err(std::io::Error::other("gone"))]);
    let request = signed("broken", b"x").body(Body::from_stream(broken)).unwrap();
    assert_eq!(stand.post(request).await.0, StatusCode::BAD_REQUEST);
    assert_eq!(stand.inbox.all().len(), 1);
}

fn never_ends(head: &'static str) -> Body {
    use futures::StreamExt;
    let head = stream::iter([Ok::<_, std::io::Error>(Bytes::from_static(head.as_bytes()))]);
    Body::from_stream(head.chain(stream::pending()))
}

#[tokio::test]
async fn slow_senders_are_let_go_and_hold_up_nobody() {
    let mut slow = source("hooks", Scheme::StandardWebhooks);
    slow.limits = SourceLimits {
        body_timeout: Duration::from_millis(300),
        body_bytes: 100,
        buffered_bytes: 1_000,
        ..SourceLimits::default()
    };
    let stand = Stand::new(vec![slow]);
    let crowd = (0..500).map(|_| stand.post(signed("slow", b"x").body(never_ends("x")).unwrap()));
    let crowd = futures::future::join_all(crowd);
    let (crowd, genuine) = tokio::join!(crowd, stand.post(message("msg_1", "{}")));
    same(&genuine, ACCEPTED);
    assert!(crowd.iter().all(|(status, _)| *status == StatusCode::SERVICE_UNAVAILABLE), "{:?}", crowd[0]);
    assert_eq!(stand.count("body_too_slow"), 500);
}

/// The headers are checked before any of the body is read.
#[tokio::test]
async fn without_the_right_headers_no_body_is_waited_for() {
    let mut patient = source("hooks", Scheme::StandardWebhooks);
    patient.limits = SourceLimits { body_timeout: HOUR, ..SourceLimits::default() };
    let stand = Stand::new(vec![patient]);
    let unsigned = Request::post("/in/hooks").body(never_ends("x")).unwrap();
    same(&stand.post(unsigned).await, (StatusCode::UNAUTHORIZED, "unverified"));
    for (name, wrong, code) in [
        ("webhook-signature", "v1,AAAA", "signature_malformed"),
        ("webhook-timestamp", "soon", "timestamp_malformed"),
        ("webhook-id", "", "id_malformed"),
    ] {
        let mut request = signed("msg_1", b"x").body(never_ends("x")).unwrap();
        request.headers_mut().insert(name, wrong.parse().unwrap());
        same(&stand.post(request).await, (StatusCode::UNAUTHORIZED, "unverified"));
        assert_eq!(stand.count(code), 1, "{code}");
    }
    // A stale timestamp alone is not trusted: the body is read, but not waited for long.
    let at = |body: Body, time: i64| {
        let mut request = signed("msg_1", b"x").body(body).unwrap();
        request.headers_mut().insert("webhook-timestamp", time.into());
        request
    };
    for time in [NOW_S - 301, NOW_S + 301, 0] {
        same(&stand.post(at(never_ends("x"), time)).await, (StatusCode::SERVICE_UNAVAILABLE, "body_too_slow"));
        same(&stand.post(at(Body::from("x"), time)).await, (StatusCode::UNAUTHORIZED, "unverified"));
    }
    assert_eq!((stand.count("signature_mismatch"), stand.count("timestamp_too_old")), (3, 0));
}

#[tokio::test]
async fn what_is_buffered_is_bounded_for_all_together() {
    let mut tight = source("hooks", Scheme::StandardWebhooks);
    tight.limits = SourceLimits {
        body_timeout: Duration::from_millis(500),
        body_bytes: 10,
        buffered_bytes: 20,
        ..SourceLimits::default()
    };
    let stand = Stand::new(vec![tight]);
    // There is always memory for three bodies of the largest size, however small the limit.
    let crowd = (0..8).map(|_| stand.post(signed("slow", b"x").body(never_ends("0123456789")).unwrap()));
    let (crowd, genuine) = tokio::join!(futures::future::join_all(crowd), stand.post(message("msg_1", "{}")));
    same(&genuine, ACCEPTED);
    assert!(crowd.iter().all(|(status, _)| *status == StatusCode::SERVICE_UNAVAILABLE), "{:?}", crowd[0]);
    assert_eq!((stand.count("body_pushed_out"), stand.count("body_too_slow")), (6, 2));
    same(&stand.post(message("after", "{}")).await, ACCEPTED);
}

#[tokio::test]
async fn a_store_that_is_down_or_hangs_makes_the_sender_come_again() {
    let mut hasty = source("hooks", Scheme::StandardWebhooks);
    hasty.limits =
        SourceLimits { store_timeout: Duration::from_millis(200), concurrency: 1, ..SourceLimits::default() };
    let stand = Stand::new(vec![hasty]);
    stand.inbox.set(Mode::Down);
    same(&stand.post(message("msg_1", "{}")).await, (StatusCode::SERVICE_UNAVAILABLE, "store_unavailable"));
    stand.inbox.set(Mode::Hangs);
    let (first, second) = tokio::join!(stand.post(message("msg_1", "{}")), stand.post(message("msg_2", "{}")));
    same(&first, (StatusCode::SERVICE_UNAVAILABLE, "store_unavailable"));
    same(&second, (StatusCode::SERVICE_UNAVAILABLE, "busy"));
    stand.inbox.set(Mode::Works);
    same(&stand.post(message("msg_1", "{}")).await, ACCEPTED);
}

#[tokio::test]
async fn all_sources_share_the_places_of_messages_being_stored() {
    let sources = ["hooks", "idle"].map(|name| source(name, Scheme::StandardWebhooks));
    let stand = Stand::bounded(sources.into(), 2);
    stand.inbox.set(Mode::Hangs);
    let mut to_idle = message("msg_3", "{}");
    *to_idle.uri_mut() = "/in/idle".parse().unwrap();
    let last = async {
        let answer = stand.post(to_idle).await;
        stand.inbox.set(Mode::Works);
        answer
    };
    let [first, second] = ["msg_1", "msg_2"].map(|id| stand.post(message(id, "{}")));
    let (first, second, last) = tokio::join!(first, second, last);
    same(&last, (StatusCode::SERVICE_UNAVAILABLE, "busy"));
    same(&first, ACCEPTED);
    same(&second, ACCEPTED);
}

#[tokio::test]
async fn a_replay_under_another_unsigned_id_is_a_duplicate() {
    let stand = Stand::new(vec![source("github", Scheme::GitHub)]);
    let delivery = |id: &str| {
        Request::post("/in/github")
            .header("x-hub-signature-256", format!("sha256={}", hex_mac(b"{\"a\":1}")))
            .header("x-github-event", "push")
            .header("x-github-delivery", id)
            .body(Body::from("{\"a\":1}"))
            .unwrap()
    };
    same(&stand.post(delivery("72d3162e")).await, ACCEPTED);
    same(&stand.post(delivery("another")).await, (StatusCode::OK, "duplicate"));
    let stored = stand.inbox.all().remove(0);
    assert_eq!(stored.event.topic, "push");
    assert!(stored.message_id.starts_with("sha256:"));
    assert_eq!(stored.event.headers["x-github-delivery"], "72d3162e");
    assert!(!stored.event.headers.contains_key("x-hub-signature-256"));
}

#[tokio::test]
async fn slack_s_question_is_answered_only_when_it_is_genuine() {
    let stand = Stand::new(vec![source("slack", Scheme::Slack)]);
    let body = r#"{"type":"url_verification","challenge":"3eZbrw1a"}"#;
    let ask = |mac: String, body: &'static str| {
        Request::post("/in/slack")
            .header("x-slack-request-timestamp", NOW_S.to_string())
            .header("x-slack-signature", format!("v0={mac}"))
            .body(Body::from(body))
            .unwrap()
    };
    let mac = |body: &str| hex_mac(format!("v0:{NOW_S}:{body}").as_bytes());
    same(&stand.post(ask(mac(body), body)).await, (StatusCode::OK, "3eZbrw1a"));
    same(&stand.post(ask(hex_mac(b""), body)).await, UNVERIFIED);
    assert!(stand.inbox.all().is_empty());
    // The user of a slash command would be shown a body.
    let command = "command=%2Fdeploy";
    same(&stand.post(ask(mac(command), command)).await, (StatusCode::OK, ""));
    assert_eq!(stand.count("accepted"), 1);
}

#[tokio::test]
async fn a_mapping_of_one_s_own_and_what_it_refuses() {
    let mut mapped = source("hooks", Scheme::StandardWebhooks);
    mapped.mapping.id = vec![Origin::Json("/meta/id".into())];
    mapped.mapping.topic = vec![Origin::Header("x-kind".into())];
    mapped.mapping.key = vec![Origin::Json("/customer".into())];
    mapped.mapping.tenant = vec![Origin::Json("/tenant".into())];
    let stand = Stand::new(vec![mapped]);
    let post = |kinds: &'static [&'static str], body: &'static str| {
        let builder = kinds.iter().fold(signed("x", body.as_bytes()), |builder, kind| builder.header("x-kind", *kind));
        stand.post(builder.body(Body::from(body)).unwrap())
    };
    let whole = r#"{"meta":{"id":7},"customer":"c1","tenant":"acme","n":1e400}"#;
    same(&post(&["a.b"], whole).await, ACCEPTED);
    let stored = stand.inbox.all().remove(0);
    assert_eq!((stored.message_id.as_str(), stored.event.topic.as_str()), ("7", "a.b"));
    assert_eq!((stored.event.key.as_deref(), stored.event.tenant.as_deref()), (Some("c1"), Some("acme")));
    assert!(Tenant::new("acme").is_ok());
    for (kinds, body, code) in [
        (&["a.b"][..], r#"{"tenant":"acme"}"#, "id_unmapped"),
        (&["a.b"], r#"{"meta":{"id":{}},"tenant":"acme"}"#, "id_unmapped"),
        (&["a.b"], "not json", "id_unmapped"),
        (&[], r#"{"meta":{"id":8},"tenant":"acme"}"#, "topic_unmapped"),
        (&["a", "b"], r#"{"meta":{"id":8},"tenant":"acme"}"#, "topic_unmapped"),
        (&["a.b"], r#"{"meta":{"id":8}}"#, "tenant_unmapped"),
        (&["a b"], r#"{"meta":{"id":8},"tenant":"acme"}"#, "event_invalid"),
    ] {
        same(&post(kinds, body).await, (StatusCode::UNPROCESSABLE_ENTITY, code));
    }
    // Without a customer there is no key, but it is stored.
    same(&post(&["a.b"], r#"{"meta":{"id":9},"tenant":"acme"}"#).await, ACCEPTED);
}

#[tokio::test]
async fn a_proxy_s_noise_does_not_keep_a_message_out() {
    let stand = Stand::standard();
    let mut request = message("msg_1", "{}");
    for number in 0..90 {
        let name: http::HeaderName = format!("x-noise-{number:02}").parse().unwrap();
        request.headers_mut().insert(name, "n".repeat(500).parse().unwrap());
    }
    for (name, value) in [("authorization", "Bearer canary"), ("cookie", "canary"), ("x-forwarded-for", "canary")] {
        request.headers_mut().insert(name, value.parse().unwrap());
    }
    request.headers_mut().insert("a-binary", http::HeaderValue::from_bytes(b"\xff").unwrap());
    request.headers_mut().append("a-list", "1".parse().unwrap());
    request.headers_mut().append("a-list", "2".parse().unwrap());
    same(&stand.post(request).await, ACCEPTED);
    let event = stand.inbox.all().remove(0).event;
    assert!(event.validate().is_ok());
    assert_eq!(event.headers["a-list"], "1, 2");
    assert!(!format!("{event:?}").contains("canary"));
    assert!(!event.headers.contains_key("webhook-signature") && !event.headers.contains_key("a-binary"));
    // Headers that did not fit are counted, headers dropped by name are not: 91 names are kept, and
    // an event has room for some of them.
    let kept = event.headers.len() as u64 - 1;
    let dropped = stand.ingress.headers_dropped();
    assert_eq!(
        dropped,
        [("hooks".parse().unwrap(), 93 - kept)],
        "90 of noise, the list, the binary one and webhook-id"
    );
}

#[tokio::test]
async fn unsigned_headers_that_an_event_cannot_have_do_not_keep_a_message_out() {
    let stand = Stand::standard();
    let long = "k".repeat(129);
    let (json, bytes) = ("application/json", "application/octet-stream");
    let cases = [
        ("content-type", "", bytes),
        ("content-type", &long, bytes),
        ("content-type", "application/json;\tcharset=utf-8", "application/json; charset=utf-8"),
        ("ce-kind", &long, json),
        ("ce-aggregate", "a\tb", json),
        ("ce-time", "0000-01-01T00:00:00Z", json),
    ];
    for (nth, (name, value, kept)) in cases.into_iter().enumerate() {
        let mut request = message(&format!("msg_{nth}"), "{}");
        request.headers_mut().insert(name, value.parse().unwrap());
        same(&stand.post(request).await, ACCEPTED);
        let event = stand.inbox.all().pop().unwrap().event;
        assert_eq!(event.content_type.as_deref().unwrap_or(json), kept, "{name}: {value:?}");
        assert_eq!((event.kind, event.aggregate, event.occurred_at), (None, None, None));
    }
}

#[tokio::test]
async fn a_signature_in_headers_of_one_s_own_is_not_stored() {
    let layout = plain::Layout { timestamp_header: Some("X-Sent-At".into()), ..plain::Layout::new("X-Proof") };
    let signer = plain::Signer::new(plain::Secret::new(TEXT_SECRET).unwrap(), layout.clone()).unwrap();
    let settings = Settings { layout: Some(layout), ..Settings::default() };
    let verifier = verifier(Scheme::Hmac, &[TEXT_SECRET], &settings).unwrap();
    let stand = Stand::new(vec![WebhookSource::new("tracker".parse().unwrap(), LogName::inbox(), verifier)]);
    let signed = signer.sign(UnixSeconds(NOW_S), b"{}").unwrap();
    let request =
        signed.iter().fold(Request::post("/in/tracker").header("x-other", "kept"), |request, (name, value)| {
            request.header(name, value)
        });
    same(&stand.post(request.body(Body::from("{}")).unwrap()).await, ACCEPTED);
    let event = stand.inbox.all().remove(0).event;
    let names: Vec<&str> = event.headers.keys().map(AsRef::as_ref).collect();
    assert_eq!(names, ["postbox-message-id", "x-other"]);
}

#[tokio::test]
async fn more_than_the_rate_is_refused_and_nobody_else_can_use_it_up() {
    let mut slow = source("hooks", Scheme::StandardWebhooks);
    slow.limits.rate = Some("2/h".parse().unwrap());
    let stand = Stand::new(vec![slow]);
    for number in 0..100 {
        let mut forged = message("msg_x", "{}");
        forged.headers_mut().insert("webhook-id", format!("msg_{number}").parse().unwrap());
        same(&stand.post(forged).await, UNVERIFIED);
    }
    same(&stand.post(message("msg_1", "{}")).await, ACCEPTED);
    let answer = stand.router.clone().oneshot(message("msg_2", "{}")).await.unwrap();
    assert_eq!(answer.status(), StatusCode::TOO_MANY_REQUESTS);
    let wait: u64 = answer.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1_700..=1_800).contains(&wait), "{wait} s until the next");
    assert_eq!((stand.count("rate_limited"), stand.inbox.all().len()), (1, 1));
}

#[tokio::test]
async fn cloudevents_consent_is_given_to_known_origins_only() {
    let mut known = source("hooks", Scheme::StandardWebhooks);
    known.allowed_origins = vec!["Events.example.org".into()];
    known.limits.rate = Some("2/s".parse().unwrap());
    let mut free = source("free", Scheme::StandardWebhooks);
    free.allowed_origins = vec!["a".into(), "b".into()];
    let stand = Stand::new(vec![known, free]);
    let ask = async |path: &str, origins: &[&str]| {
        let request = Request::options(path).header("webhook-request-rate", "120");
        let request = request.header("webhook-request-callback", "http://127.0.0.1:1/confirm");
        let request = origins.iter().fold(request, |request, origin| request.header("webhook-request-origin", *origin));
        let answer = stand.router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        let header = |name: &str| answer.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
        (answer.status(), header("webhook-allowed-origin"), header("webhook-allowed-rate"), header("allow"))
    };
    let granted = |origin: &str, rate: &str| {
        (StatusCode::OK, Some(origin.to_owned()), Some(rate.to_owned()), Some("POST, OPTIONS".to_owned()))
    };
    assert_eq!(ask("/in/hooks", &["events.EXAMPLE.org"]).await, granted("Events.example.org", "120"));
    assert_eq!(ask("/t/acme/in/free", &["b"]).await, granted("b", "*"));
    let refused = (StatusCode::FORBIDDEN, None, None, None);
    for origins in [&["evil.example.org"][..], &["*"], &[""], &[], &["events.example.org", "events.example.org"]] {
        assert_eq!(ask("/in/hooks", origins).await, refused, "{origins:?}");
    }
    assert_eq!(ask("/in/nobody", &["b"]).await.0, StatusCode::NOT_FOUND);
    assert_eq!((stand.count("consent"), stand.count("origin_refused")), (2, 5));
    // Consent is not authentication.
    let unsigned = Request::post("/in/hooks").header("origin", "events.example.org").body(Body::from("{}")).unwrap();
    same(&stand.post(unsigned).await, UNVERIFIED);
}

#[tokio::test]
async fn a_source_s_own_function_makes_the_event() {
    let mut own = source("hooks", Scheme::StandardWebhooks).convert(|message| {
        let body: serde_json::Value = serde_json::from_slice(message.body)?;
        match body["type"].as_str() {
            Some("invoice.paid") => {
                let text = format!("paid by {} ({})", body["who"], message.message_id);
                Ok(Some(NewEvent::new("billing.paid", text, "text/plain").key("c1")))
            }
            Some("broken") => panic!("as asked"),
            Some("huge") => Ok(Some(NewEvent::new("x y", "", "text/plain"))),
            _ => Ok(None),
        }
    });
    own.mapping.tenant = vec![Origin::Json("/tenant".into())];
    let stand = Stand::new(vec![own]);
    let post = |id: &'static str, body: &'static str| stand.post(message(id, body));
    same(&post("m1", r#"{"type":"invoice.paid","who":"ann","tenant":"acme"}"#).await, ACCEPTED);
    // Another body under the same id is a conflict, although both make the same event.
    same(&post("m1", r#"{"type":"invoice.paid","who":"ann","tenant":"acme" }"#).await, (StatusCode::OK, "conflict"));
    same(&post("m2", r#"{"type":"invoice.sent","tenant":"acme"}"#).await, (StatusCode::OK, "ignored"));
    let unmapped = |code| (StatusCode::UNPROCESSABLE_ENTITY, code);
    same(&post("m3", r#"{"type":"invoice.paid"}"#).await, unmapped("tenant_unmapped"));
    same(&post("m4", "no json").await, unmapped("tenant_unmapped"));
    same(&post("m5", r#"{"type":"huge","tenant":"acme"}"#).await, unmapped("event_invalid"));
    let broken = post("m6", r#"{"type":"broken","tenant":"acme"}"#).await;
    same(&broken, (StatusCode::INTERNAL_SERVER_ERROR, "convert_panicked"));
    let stored = stand.inbox.all();
    assert_eq!(stored.len(), 1);
    let event = &stored[0].event;
    assert_eq!((event.topic.as_str(), &event.payload[..]), ("billing.paid", &br#"paid by "ann" (m1)"#[..]));
    assert_eq!((event.key.as_deref(), event.tenant.as_deref()), (Some("c1"), Some("acme")));
    assert_eq!((event.source.as_deref(), event.headers["postbox-message-id"].as_str()), (Some("hooks"), "m1"));
    // Unverified messages never reach the function.
    let forged = Request::post("/in/hooks").body(Body::from(r#"{"type":"broken"}"#)).unwrap();
    same(&stand.post(forged).await, UNVERIFIED);

    let refusing = Stand::new(vec![source("hooks", Scheme::StandardWebhooks).convert(|_| Err("not today".into()))]);
    let (warnings, _hears) = Warnings::hear();
    for _ in 0..400 {
        same(&refusing.post(message("m1", "{}")).await, unmapped("convert_failed"));
    }
    let lines = warnings.all().iter().filter(|line| line.contains("webhook conversion failed")).count();
    assert!((1..100).contains(&lines), "{lines}");
    assert!(refusing.inbox.all().is_empty());
}

#[test]
fn contradictions_in_the_configuration_are_refused() {
    let make = |sources| Ingress::new(sources, Arc::new(Inbox::default()), Arc::new(StillClock)).err();
    let code = |sources| make(sources).expect("refused").code().to_owned();
    let standard = || source("hooks", Scheme::StandardWebhooks);
    assert!(make(vec![]).is_none());
    assert_eq!(code(vec![standard(), standard()]), "source_twice");
    for limits in [
        SourceLimits { body_bytes: 0, ..SourceLimits::default() },
        SourceLimits { body_bytes: 17 * 1024 * 1024, ..SourceLimits::default() },
        SourceLimits { concurrency: 0, ..SourceLimits::default() },
        SourceLimits { body_timeout: Duration::ZERO, ..SourceLimits::default() },
    ] {
        let mut wrong = standard();
        wrong.limits = limits;
        assert_eq!(code(vec![wrong]), "source_limits_invalid");
    }
}
