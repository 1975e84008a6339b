//! Both ends of a webhook for users' tests: only genuine messages get through.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use postbox::http::{HttpSink, HttpSinkConfig};
use postbox::ingress::WebhookSource;
use postbox::test::{self, Receiver, Webhooks};
use postbox::webhook::{
    Scheme, Settings, UnixSeconds, Verify, github, plain, shopify, slack, standard, stripe, twilio, verifier,
};
use postbox::{
    Append as _, LogName, NewEvent, Relay, RelaySettings, RetryPolicy, Service, SourceName, Subscription, TokioClock,
};
use tokio::time::timeout;

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OTHER: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
const TWILIO_URL: &str = "https://example.org/in/twilio";

fn checks(scheme: Scheme) -> Box<dyn Verify> {
    let layout = Some(plain::Layout::new("x-sig"));
    let settings = Settings { public_url: Some(TWILIO_URL.into()), layout, ..Settings::default() };
    verifier(scheme, &[SECRET], &settings).expect("a verifier")
}

/// Returns the headers that a provider of the scheme would send with this secret.
fn signed(scheme: Scheme, secret: &str, body: &[u8]) -> Vec<(String, String)> {
    let now = UnixSeconds(Timestamp::now().as_second());
    match scheme {
        Scheme::Stripe => stripe::Secret::new(secret).expect("a secret").sign(now, body),
        Scheme::Slack => slack::Secret::new(secret).expect("a secret").sign(now, body),
        Scheme::GitHub => github::Secret::new(secret).expect("a secret").sign(body),
        Scheme::Shopify => shopify::Secret::new(secret).expect("a secret").sign(body),
        Scheme::Twilio => twilio::Secret::new(secret).expect("a secret").sign(TWILIO_URL, body),
        Scheme::Hmac => {
            let secret = plain::Secret::new(secret).expect("a secret");
            plain::Signer::new(secret, plain::Layout::new("x-sig")).expect("a signer").sign(now, body).expect("signed")
        }
        _ => {
            let key = standard::SymmetricKey::parse(secret).expect("a key");
            let signed = standard::Signer::new([key.into()]).expect("a signer").sign("msg_1", now, body);
            let signed = signed.expect("signed");
            signed.headers().into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
        }
    }
}

#[tokio::test]
async fn a_source_whose_log_does_not_exist_ends_the_start() {
    let (name, log) = (SourceName::new("partner").expect("a name"), LogName::new("nowhere").expect("a name"));
    let source = WebhookSource::new(name, log, checks(Scheme::Stripe));
    let service = Service::builder(test::store()).source(source).build().expect("built");
    let run = timeout(Duration::from_secs(60), service.run_until(pending::<()>()));
    let refused = run.await.expect("in time").expect_err("it started");
    assert_eq!(refused.code(), "log_unknown");
}

#[tokio::test]
async fn a_message_of_each_provider_is_taken_and_a_forged_one_is_not() {
    let schemes: Vec<_> = Scheme::ALL.into_iter().filter(|scheme| *scheme != Scheme::Sns).collect();
    let mut service = Service::builder(test::store());
    for scheme in &schemes {
        let name = SourceName::new(scheme.as_str()).expect("a name");
        service = service.source(WebhookSource::new(name, LogName::inbox(), checks(*scheme)));
    }
    let service = service.build().expect("built");
    let webhooks = Webhooks::serve(service.ingress()).await.expect("served");
    for scheme in schemes {
        let body = match scheme {
            Scheme::Twilio => b"MessageSid=SM1&Body=hello".as_slice(),
            _ => br#"{"id":"evt_1","type":"checkout.session.completed"}"#,
        };
        let post =
            async |headers: &[(String, String)]| webhooks.post(scheme.as_str(), headers, body).await.expect("answered");
        let accepted = if matches!(scheme, Scheme::Slack | Scheme::Twilio) { 200 } else { 202 };
        assert_eq!(post(&signed(scheme, SECRET, body)).await, accepted, "{scheme}");
        assert_eq!(post(&signed(scheme, OTHER, body)).await, 401, "{scheme}");
        assert_eq!(post(&[]).await, 401, "{scheme}");
    }
}

#[tokio::test]
async fn a_receiver_keeps_what_is_genuine_each_message_once() {
    let receiver = Receiver::start(checks(Scheme::StandardWebhooks)).await.expect("started");
    let store = test::store();
    let paid = NewEvent::json("order.paid", r#"{"order":1}"#);
    store.append(&LogName::outbox(), &[paid]).await.expect("appended");
    for (name, secret, delivered) in [("forger", OTHER, 0), ("ours", SECRET, 1), ("again", SECRET, 1)] {
        let config = HttpSinkConfig {
            keys: vec![standard::SignKey::parse(secret).expect("a key")],
            allow: vec!["127.0.0.1/32".parse().expect("a network")],
            ..HttpSinkConfig::new(receiver.url())
        };
        let sink = HttpSink::new(config, Arc::new(TokioClock::new())).expect("a sink");
        let subscription = Subscription::new(name.parse().expect("a name"), LogName::outbox());
        let retry = RetryPolicy { attempts_max: 1, ..RetryPolicy::default() };
        let relay = Relay::builder(Arc::new(store.clone()), subscription).sink(Arc::new(sink));
        let relay = relay.settings(RelaySettings { retry, ..RelaySettings::default() }).build().expect("built");
        assert_eq!(relay.drain(None).await.expect("drained").delivered, delivered, "{name}");
        assert_eq!(receiver.received().await.expect("read").len(), usize::from(name != "forger"), "{name}");
    }
    assert_eq!(receiver.received().await.expect("read")[0].payload, br#"{"order":1}"#[..]);
}
