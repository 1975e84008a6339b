//! A message is identified only by what its sender signed, however a stranger who captured it
//! changes the rest.

use std::sync::Arc;

use axum::body::Body;
use futures::future::join_all;
use http::{Request, StatusCode};
use postbox_core::{LogName, SourceName};
use postbox_ingress::{Ingress, Origin, SnsClient, WebhookSource};
use postbox_testkit::clock::StillClock;
use postbox_testkit::inbox::{Inbox, Mode};
use postbox_testkit::warnings::Warnings;
use postbox_webhook::sns::{TopicArn, Verifier};
use postbox_webhook::{Scheme, Settings, UnixSeconds, plain, verifier};

use crate::NOW_S;
use crate::ingress::{ACCEPTED, Stand, TEXT_SECRET, message, same, signed, source};

const DUPLICATE: (StatusCode, &str) = (StatusCode::OK, "duplicate");
const CONFLICT: (StatusCode, &str) = (StatusCode::OK, "conflict");
/// Twilio texts the body of any other answer to the sender of an SMS.
const NO_REPLY: (StatusCode, &str) = (StatusCode::OK, "<Response/>");
/// Computed with Python's standard library, from [`FORM`] at [`TWILIO_URL`] with [`TEXT_SECRET`].
const TWILIO_SIGNATURE: &str = "z93gBVF6mTyzS/xlLWj/ZlIrbk0=";
const TWILIO_URL: &str = "https://hooks.example.org/in/twilio";
const FORM: &str = "CallSid=CA1&Digits=12";

fn header(name: &str) -> Vec<Origin> {
    vec![Origin::Header(name.into())]
}

fn json(pointer: &str) -> Vec<Origin> {
    vec![Origin::Json(pointer.into())]
}

fn refusal(source: WebhookSource) -> Option<postbox_core::Error> {
    Ingress::new(vec![source], Arc::new(Inbox::default()), Arc::new(StillClock)).err()
}

#[test]
fn a_tenant_that_nobody_signed_is_refused() {
    // The three schemes left out need other secrets and settings; the rule is the same for all.
    for scheme in
        Scheme::ALL.into_iter().filter(|scheme| !matches!(scheme, Scheme::Sns | Scheme::Twilio | Scheme::Stripe))
    {
        let with = |tenant| {
            let mut source = source("a", scheme);
            source.mapping.tenant = tenant;
            refusal(source)
        };
        for name in ["x-shopify-shop-domain", "ce-tenant", "svix-id"] {
            // Also behind a signed place, because that one may be absent.
            for tenant in [header(name), [json("/tenant"), header(name)].concat()] {
                let reported = with(tenant).expect("refused");
                assert_eq!(reported.code(), "tenant_unsigned", "{scheme} {name}");
                assert!(
                    reported.message().contains(name) && reported.message().contains("write a fixed text"),
                    "{reported}"
                );
            }
        }
        for tenant in [json("/tenant"), vec![Origin::Literal("acme".into())], vec![]] {
            assert!(with(tenant).is_none(), "{scheme}");
        }
    }
}

#[test]
fn of_an_sns_message_only_the_signed_fields_are_signed() {
    let topic = TopicArn::parse("arn:aws:sns:eu-central-1:123456789012:orders").unwrap();
    let with = |tenant| {
        let verifier = Verifier::new([topic.clone()]).unwrap();
        let (name, client) = (SourceName::new("a").unwrap(), SnsClient::default());
        let mut source = WebhookSource::sns(name, LogName::inbox(), verifier, false, &client).unwrap();
        source.mapping.tenant = tenant;
        refusal(source).map(|error| error.code().to_owned())
    };
    for pointer in ["/MessageAttributes/shop/Value", "/UnsubscribeURL", "", "/message"] {
        assert_eq!(with(json(pointer)).as_deref(), Some("tenant_unsigned"), "{pointer}");
    }
    for pointer in ["/Subject", "/TopicArn"] {
        assert_eq!(with(json(pointer)), None, "{pointer}");
    }
}

#[test]
fn an_id_that_nobody_signed_is_warned_of() {
    let (warnings, _guard) = Warnings::hear();
    let mut github = source("a", Scheme::GitHub);
    assert!(refusal(source("a", Scheme::GitHub)).is_none());
    github.mapping.id = header("x-github-delivery");
    assert!(refusal(github).is_none(), "a risk is not a fault");
    let mut standard = source("a", Scheme::StandardWebhooks);
    standard.mapping.id = header("webhook-id");
    assert!(refusal(standard).is_none());
    let layout = plain::Layout { timestamp_header: Some("X-Sent-At".into()), ..plain::Layout::new("X-Proof") };
    let settings = Settings { layout: Some(layout), ..Settings::default() };
    let timed = verifier(Scheme::Hmac, &[TEXT_SECRET], &settings).unwrap();
    let mut timed = WebhookSource::new(SourceName::new("a").unwrap(), LogName::inbox(), timed);
    timed.mapping.id = header("x-sent-at");
    assert!(refusal(timed).is_none());
    let reported = warnings.all();
    assert_eq!(reported.len(), 1, "{reported:?}");
    assert!(
        reported[0].contains("id_unsigned") && reported[0].contains("applied again under other ids"),
        "{reported:?}"
    );
}

fn twilio(id: Vec<Origin>) -> Stand {
    let settings = Settings { public_url: Some(TWILIO_URL.into()), ..Settings::default() };
    let verifier = verifier(Scheme::Twilio, &[TEXT_SECRET], &settings).unwrap();
    let mut source = WebhookSource::new(SourceName::new("twilio").unwrap(), LogName::inbox(), verifier);
    source.mapping.id = id;
    Stand::new(vec![source])
}

#[tokio::test]
async fn a_form_in_another_spelling_is_the_same_message() {
    for id in [vec![Origin::SignedId], vec![Origin::BodyDigest], vec![Origin::Literal("one".into())]] {
        let stand = twilio(id);
        let post = |form: String| {
            let request = Request::post("/in/twilio")
                .header("x-twilio-signature", TWILIO_SIGNATURE)
                .header("content-type", "application/x-www-form-urlencoded");
            stand.post(request.body(Body::from(form)).unwrap())
        };
        same(&post(FORM.into()).await, NO_REPLY);
        for repeats in 1..50 {
            same(&post(FORM.to_owned() + &"&Digits=12".repeat(repeats)).await, NO_REPLY);
        }
        for other in
            ["Digits=12&CallSid=CA1", "CallSid=CA1&Digits=%312&&", "CallSid=CA1&Digit=s12", "CallSidC=A1&Digits=12"]
        {
            same(&post(other.into()).await, NO_REPLY);
        }
        assert_eq!((stand.inbox.all().len(), stand.count("conflict"), stand.count("duplicate")), (1, 0, 53));
        assert_eq!(&stand.inbox.all()[0].event.payload[..], FORM.as_bytes(), "stored as it came first");
    }
}

#[tokio::test]
async fn conflicts_are_counted_one_by_one_and_their_warnings_are_rate_limited() {
    let (warnings, _guard) = Warnings::hear();
    let stand = Stand::standard();
    let post = |body: String| stand.post(signed("msg_1", body.as_bytes()).body(Body::from(body)).unwrap());
    same(&post("{}".into()).await, ACCEPTED);
    for spaces in 1..=100 {
        same(&post(format!("{{{}}}", " ".repeat(spaces))).await, CONFLICT);
    }
    assert_eq!(stand.count("conflict"), 100);
    let reported = warnings.all();
    let counts: Vec<bool> = [1, 2, 4, 8, 16, 32, 64]
        .iter()
        .zip(&reported)
        .map(|(count, line)| line.contains(&format!("conflicts={count} ")) && line.contains("message_id=\"msg_1\""))
        .collect();
    assert_eq!(counts, [true; 7], "{reported:#?}");
    assert_eq!(reported.len(), 7, "{reported:#?}");
}

#[tokio::test]
async fn what_breaks_a_rule_is_logged_with_field_rule_and_id() {
    let (warnings, _guard) = Warnings::hear();
    let mut mapped = source("hooks", Scheme::StandardWebhooks);
    mapped.mapping.id = json("/id");
    mapped.mapping.topic = header("x-kind");
    mapped.mapping.key = json("/key");
    mapped.mapping.tenant = json("/tenant");
    let stand = Stand::new(vec![mapped]);
    let ids = ["i".repeat(256), "i".repeat(255)];
    let long = |field: &str, bytes: usize| {
        format!(r#"{{"id":"msg_7","tenant":"acme","canary":"canary","{field}":"{}"}}"#, "x".repeat(bytes))
    };
    let whole = r#"{"id":"msg_7","tenant":"acme","canary":"canary"}"#.to_owned();
    for (kind, body, field, rule, id) in [
        ("a b", whole.clone(), "topic", "topic_invalid", "msg_7"),
        (&"t".repeat(300), whole, "topic", "topic_too_long", "msg_7"),
        ("a.b", long("key", 2_000), "key", "key_too_long", "msg_7"),
        ("a.b", long("tenant", 129), "tenant", "tenant_too_long", "msg_7"),
        ("a.b", r#"{"id":"msg_7"}"#.into(), "tenant", "tenant_unmapped", "msg_7"),
        ("a.b", r#"{"id":"a\u001b[31m"}"#.into(), "id", "id_unmapped", "-"),
        ("a.b", format!(r#"{{"id":"{}"}}"#, ids[0]), "id", "id_unmapped", "-"),
        ("a.b", "{}".into(), "id", "id_unmapped", "-"),
        ("a\u{202e}b ", format!(r#"{{"id":"{}","tenant":"acme"}}"#, ids[1]), "topic", "topic_invalid", &ids[1][..200]),
    ] {
        let before = warnings.all().len();
        let kind = http::HeaderValue::from_bytes(kind.as_bytes()).unwrap();
        let request = signed("x", body.as_bytes()).header("x-kind", kind).body(Body::from(body.clone())).unwrap();
        let (status, _) = stand.post(request).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{body}");
        let reported = warnings.all().split_off(before);
        assert_eq!(reported.len(), 1, "{reported:?}");
        for part in [format!("field=\"{field}\""), format!("rule=\"{rule}\""), format!("message_id=\"{id}")] {
            assert!(reported[0].contains(&part), "no {part} in {}", reported[0]);
        }
        assert!(
            !reported[0].contains("canary") && !reported[0].contains(['\u{1b}', '\u{202e}']) && reported[0].len() < 700,
            "{}",
            reported[0]
        );
    }
    assert!(warnings.all().iter().any(|line| line.contains("there is none at json:/id")));
    assert!(warnings.all().iter().any(|line| line.contains("256 bytes, at most 255")));
}

#[tokio::test]
async fn a_captured_message_that_is_no_event_does_not_fill_the_log() {
    let (warnings, _guard) = Warnings::hear();
    let mut mapped = source("hooks", Scheme::StandardWebhooks);
    mapped.mapping.topic = header("x-kind");
    let stand = Stand::new(vec![mapped]);
    for _ in 0..1_000 {
        assert_eq!(stand.post(message("msg_1", "{}")).await.0, StatusCode::UNPROCESSABLE_ENTITY);
    }
    assert_eq!(stand.count("topic_unmapped"), 1_000);
    let reported = warnings.all().len();
    assert!((60..130).contains(&reported), "{reported} lines");
}

#[tokio::test]
async fn credentials_of_whatever_name_are_not_kept() {
    let stand = Stand::standard();
    let mut request = message("msg_1", "{}");
    for name in [
        "authorization",
        "cookie",
        "x-api-key",
        "x-auth-token",
        "x-access-token",
        "x-csrf-token",
        "x-xsrf-token",
        "x-amz-security-token",
        "x-amzn-oidc-data",
        "x-gitlab-token",
        "cf-access-jwt-assertion",
        "x-vault-token",
        "x-remote-user",
        "x-auth-request-user",
        "x-client-ip",
        "true-client-ip",
        "cf-connecting-ip",
        "proxy-authorization",
        "x-forwarded-access-token",
        "stripe-signature",
        "x-hub-signature-256",
        "x-ms-client-principal",
        "x-ms-client-principal-name",
        "x-ms-token-aad-id-token",
        "x-amzn-oidc-identity",
        "x-amzn-mtls-clientcert",
        "cf-access-authenticated-user-email",
        "x-goog-iap-jwt-assertion",
        "x-goog-authenticated-user-email",
        "remote-user",
        "remote_user",
        "x-authenticated-user",
        "x-webauth-user",
        "x-cluster-client-ip",
        "fastly-client-ip",
        "x-envoy-original-path",
        "x-original-method",
        "postbox-dead-code",
    ] {
        request.headers_mut().insert(name, "canary".parse().unwrap());
    }
    request.headers_mut().insert("x-token-count", "7".parse().unwrap());
    same(&stand.post(request).await, ACCEPTED);
    let event = stand.inbox.all().remove(0).event;
    assert!(!format!("{event:?}").contains("canary"), "{event:?}");
    assert_eq!(event.headers["x-token-count"], "7");
}

#[tokio::test]
async fn a_captured_message_does_not_use_up_the_rate() {
    let mut hooks = source("hooks", Scheme::StandardWebhooks);
    hooks.limits.rate = Some("2/s".parse().unwrap());
    let stand = Stand::new(vec![hooks]);
    same(&stand.post(message("msg_1", "{}")).await, ACCEPTED);
    for _ in 0..100 {
        same(&stand.post(message("msg_1", "{}")).await, DUPLICATE);
    }
    stand.inbox.set(Mode::Hangs);
    let repeated = join_all((0..16).map(|_| stand.post(message("msg_1", "{}"))));
    let answered = async { stand.inbox.set(Mode::Works) };
    let (repeated, genuine, ()) = tokio::join!(repeated, stand.post(message("msg_2", "{}")), answered);
    repeated.iter().for_each(|answer| same(answer, DUPLICATE));
    same(&genuine, ACCEPTED);
}

#[tokio::test]
async fn a_captured_message_under_other_headers_is_a_duplicate() {
    let mut shopify = source("shopify", Scheme::Shopify);
    shopify.mapping.tenant = vec![Origin::Literal("acme".into())];
    let stand = Stand::new(vec![shopify]);
    let body = r#"{"id":1}"#;
    let key = plain::Secret::new(TEXT_SECRET).unwrap();
    let layout = plain::Layout { encoding: plain::Encoding::Base64, ..plain::Layout::new("x") };
    let mac = plain::Signer::new(key, layout).unwrap().sign(UnixSeconds(NOW_S), body.as_bytes()).unwrap().remove(0).1;
    let post = |shop: &str, id: &str| {
        let request = Request::post("/in/shopify")
            .header("x-shopify-hmac-sha256", &mac)
            .header("x-shopify-shop-domain", shop)
            .header("x-shopify-webhook-id", id);
        stand.post(request.body(Body::from(body)).unwrap())
    };
    same(&post("a.myshopify.com", "1").await, ACCEPTED);
    same(&post("b.myshopify.com", "2").await, DUPLICATE);
    same(&post("c.myshopify.com", "3").await, DUPLICATE);
    assert_eq!(stand.inbox.all()[0].event.tenant.as_deref(), Some("acme"));
}
