//! The requests that a target receives.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use http::HeaderMap;
use jiff::Timestamp;
use postbox_core::{Clock, Envelope, Key, NewEvent, Topic};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_webhook::standard::{Verifier, VerifyKey};
use postbox_webhook::{Headers, Request, UnixSeconds, Verify};

use crate::stand::{
    NOW_S, ParseKey, SECRET, Seen, StillClock, Target, config, delivery, event_id, plain, send, short, sink,
};

const OTHER: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

fn genuine(seen: &Seen, secret: &str) -> bool {
    let headers: Headers<'_> = seen.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    let verifier = Verifier::new([VerifyKey::parse(secret).unwrap()]).unwrap();
    verifier.verify(&Request::new(&headers, &seen.body), UnixSeconds(NOW_S)).is_ok()
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    assert!(headers.get_all(name).iter().count() <= 1, "{name} is there twice");
    headers.get(name).map(|value| String::from_utf8(value.as_bytes().to_vec()).unwrap())
}

/// Some servers refuse a POST without a length.
#[tokio::test]
async fn an_empty_payload_has_a_length() {
    let (target, url) = Target::ok().await;
    let event = NewEvent::new("note", &b""[..], "text/plain");
    assert_eq!(short(&send(&sink(config(&url)), &delivery(5, event)).await), ("delivered", ""));
    let seen = target.seen().remove(0);
    assert_eq!((text(&seen.headers, "content-length").as_deref(), seen.body.len()), (Some("0"), 0));
}

#[tokio::test]
async fn the_request_says_everything_about_the_event() {
    let (target, url) = Target::ok().await;
    let occurred: Timestamp = "2025-12-24T18:00:00.123456Z".parse().unwrap();
    let event = NewEvent::new("order.paid", &b"\x00\xff raw"[..], "application/x-thing; v=1")
        .key("Zoë 42")
        .aggregate("order")
        .version(7)
        .kind("integration")
        .source("billing")
        .tenant("acme & co")
        .header("traceparent", "00-ab-cd-01")
        .header("X-Note", "Zoë")
        .occurred_at(occurred);
    assert_eq!(short(&send(&sink(config(&url)), &delivery(5, event)).await), ("delivered", ""));
    let seen = target.seen().remove(0);
    assert_eq!(&seen.body[..], b"\x00\xff raw");
    for (name, value) in [
        ("content-type", "application/x-thing; v=1"),
        ("content-length", "6"),
        ("ce-specversion", "1.0"),
        ("ce-id", &event_id(5).to_string()),
        ("ce-type", "order.paid"),
        ("ce-source", "billing"),
        ("ce-time", "2025-12-24T18:00:00.123456Z"),
        ("ce-subject", "Zo%C3%AB%2042"),
        ("ce-kind", "integration"),
        ("ce-aggregate", "order"),
        ("ce-version", "7"),
        ("ce-tenant", "acme%20&%20co"),
        ("webhook-id", &event_id(5).to_string()),
        ("webhook-timestamp", &NOW_S.to_string()),
        ("traceparent", "00-ab-cd-01"),
        ("x-note", "Zoë"),
    ] {
        assert_eq!(text(&seen.headers, name).as_deref(), Some(value), "{name}");
    }
    assert!(genuine(&seen, SECRET) && !genuine(&seen, OTHER));
}

#[tokio::test]
async fn every_key_signs_while_one_rotates_and_none_without_keys() {
    let (target, url) = Target::ok().await;
    let keys = [SECRET, OTHER].map(|key| postbox_webhook::standard::SignKey::parse(key).unwrap()).to_vec();
    send(&sink(HttpSinkConfig { keys, ..config(&url) }), &plain(1)).await;
    send(&sink(HttpSinkConfig { keys: Vec::new(), ..config(&url) }), &plain(2)).await;
    let seen = target.seen();
    assert!(genuine(&seen[0], SECRET) && genuine(&seen[0], OTHER));
    // A handler without a secret can still deduplicate.
    assert_eq!(text(&seen[1].headers, "webhook-id"), Some(event_id(2).to_string()));
    assert_eq!(text(&seen[1].headers, "webhook-signature"), None);
}

/// A clock that the test sets.
struct SetClock(AtomicI64);

#[async_trait]
impl Clock for SetClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_second(self.0.load(Ordering::Relaxed)).unwrap()
    }

    fn monotonic(&self) -> Duration {
        StillClock.monotonic()
    }

    async fn sleep(&self, duration: Duration) {
        StillClock.sleep(duration).await;
    }
}

#[tokio::test]
async fn an_old_key_signs_until_its_end_and_not_a_second_longer() {
    let (target, url) = Target::ok().await;
    let clock = Arc::new(SetClock(AtomicI64::new(NOW_S)));
    let end = Timestamp::from_second(NOW_S + 60).unwrap();
    let config = HttpSinkConfig { keys_retiring: vec![(OTHER.parse_key(), end)], ..config(&url) };
    let sink = HttpSink::new(config.clone(), clock.clone()).unwrap();
    for (second, old_signs) in [(0, true), (60, true), (61, false), (200, false), (30, true)] {
        clock.0.store(NOW_S + second, Ordering::Relaxed);
        assert_eq!(short(&send(&sink, &plain(1)).await), ("delivered", ""));
        let seen = target.seen().pop().unwrap();
        assert_eq!((genuine(&seen, SECRET), genuine(&seen, OTHER)), (true, old_signs), "{second}");
    }
    // To configure no keys is a choice. To configure only keys that end is a mistake.
    let only = HttpSinkConfig { keys: Vec::new(), ..config };
    let refused = HttpSink::new(only.clone(), clock).err().expect("refused");
    assert!(
        refused.message().contains("every secret has an end, after which nothing could be signed; add the new one"),
        "{refused}"
    );
    assert!(!format!("{only:?}").contains("AAECAwQ"));
}

#[tokio::test]
async fn a_replay_has_a_fresh_id_and_keeps_the_original() {
    let (target, url) = Target::ok().await;
    let mut replay = plain(3);
    replay.replay = 2;
    send(&sink(config(url)), &replay).await;
    let seen = target.seen().remove(0);
    assert_eq!(text(&seen.headers, "webhook-id"), Some(format!("{}-r2", event_id(3))));
    assert_eq!(text(&seen.headers, "ce-id"), Some(event_id(3).to_string()));
    assert!(genuine(&seen, SECRET));
}

#[tokio::test]
async fn an_event_cannot_set_what_is_not_its_own() {
    let (target, url) = Target::ok().await;
    let reserved = [
        "host",
        "Content-Length",
        "Transfer-Encoding",
        "connection",
        "webhook-id",
        "Webhook-Signature",
        "ce-type",
        "CE-Source",
        "svix-id",
        "proxy-authorization",
        "authorization",
        "cookie",
        "expect",
        "content-encoding",
        "content-type",
        "x-forwarded-for",
        "X-Forwarded-User",
        "x-forwarded-client-cert",
        "x-http-method",
        "x-http-method-override",
        "X-Method-Override",
        "x-original-url",
        "x-rewrite-url",
        "x-real-ip",
        "True-Client-IP",
        "cf-connecting-ip",
        "x-client-ip",
        "X-Remote-User",
        "x-auth-request-user",
        "x-client-cert",
        "x-ssl-client-cert",
        "x-api-key",
        "X-Auth-Token",
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
        "Remote_User",
        "x-authenticated-user",
        "x-webauth-user",
        "x-cluster-client-ip",
        "fastly-client-ip",
        "x-envoy-original-path",
        "x-original-method",
        "x_forwarded_user",
        "webhook_id",
        "ce_type",
        "fixed",
        "fixed-too",
        "fixed_three",
    ];
    let event = reserved.iter().fold(NewEvent::json("t", "{}"), |event, name| event.header(*name, "spoofed"));
    let fixed = ["Fixed", "fixed_too", "fixed-three"].map(|name| (String::from(name), String::from("ours")));
    let fixed = HttpSinkConfig { headers: fixed.into(), ..config(&url) };
    let event = event
        .header("ok", "kept")
        .header("content-language", "kept")
        .header("own_name", "kept")
        .header("postbox-dead-code", "kept");
    let outcome = send(&sink(fixed), &delivery(1, event)).await;
    assert_eq!(short(&outcome), ("delivered", ""));
    let seen = target.seen().remove(0);
    assert!(seen.headers.values().all(|value| value != "spoofed"), "{:?}", seen.headers);
    for name in ["ok", "content-language", "own_name", "postbox-dead-code"] {
        assert_eq!(text(&seen.headers, name).as_deref(), Some("kept"), "{name}");
    }
    assert_eq!(text(&seen.headers, "fixed").as_deref(), Some("ours"));
    assert!(genuine(&seen, SECRET));
}

#[tokio::test]
async fn what_http_cannot_carry_is_dead_by_name_and_never_sent() {
    let (target, url) = Target::ok().await;
    let sink = sink(config(url));
    // Such events can only come from a store that another program wrote to: `NewEvent::validate`
    // refuses most of them.
    let event = || NewEvent::json("t", "{}");
    for (event, code) in [
        (event().header("x", "a\r\nhost: evil"), "header_invalid"),
        (event().header("x", "a\0b"), "header_invalid"),
        (event().header("x\r\ny", "a"), "header_invalid"),
        (event().header("x y", "a"), "header_invalid"),
        (event().header("", "a"), "header_invalid"),
        (event().header("Zoë", "a"), "header_invalid"),
        (event().header("a".repeat(70_000), "a"), "header_invalid"),
        (NewEvent::new("t", "{}", "text/plain\r\nhost: evil"), "header_invalid"),
        (event().header("Trace", "a").header("trace", "b"), "header_duplicate"),
    ] {
        let outcome = send(&sink, &delivery(1, event)).await;
        assert_eq!(short(&outcome), ("dead", code), "{outcome:?}");
        assert!(!crate::stand::text(&outcome).contains('\r'));
    }
    assert_eq!(target.seen().len(), 0);
}

#[tokio::test]
async fn hostile_names_arrive_encoded() {
    let (target, url) = Target::ok().await;
    let mut hostile = plain(1);
    hostile.event.topic = Topic::from_stored("a b\r\nhost: evil\u{202e}%41\"");
    hostile.event.key = Some(Key::from_stored("\0\r\n; drop table 🔑"));
    hostile.event.source = Some("x\ny".into());
    assert_eq!(short(&send(&sink(config(url)), &hostile).await), ("delivered", ""));
    let seen = target.seen().remove(0);
    assert_eq!(text(&seen.headers, "ce-type").as_deref(), Some("a%20b%0D%0Ahost:%20evil%E2%80%AE%2541%22"));
    assert_eq!(text(&seen.headers, "ce-subject").as_deref(), Some("%00%0D%0A;%20drop%20table%20%F0%9F%94%91"));
    assert_eq!(text(&seen.headers, "ce-source").as_deref(), Some("x%0Ay"));
}

#[tokio::test]
async fn the_signature_covers_the_body_of_each_envelope() {
    let (target, url) = Target::ok().await;
    let event = || NewEvent::json("order.paid", "{\"cents\":1}").key("k").header("traceparent", "00-ab-cd-01");
    for envelope in Envelope::ALL {
        send(&sink(HttpSinkConfig { envelope, ..config(&url) }), &delivery(1, event())).await;
        let seen = target.seen().pop().unwrap();
        assert!(genuine(&seen, SECRET), "{envelope:?}");
        assert_eq!(text(&seen.headers, "traceparent").as_deref(), Some("00-ab-cd-01"));
        let (body, content_type, binary) = match envelope {
            Envelope::CloudEventsBinary => ("{\"cents\":1}", "application/json", true),
            Envelope::CloudEvents => ("{\"specversion\":\"1.0\"", "application/cloudevents+json; charset=UTF-8", false),
            Envelope::Raw => ("{\"cents\":1}", "application/json", false),
            Envelope::Json => ("{\"id\":", "application/json", false),
            Envelope::Replica => ("{\"event_id\":", "application/json", false),
            Envelope::Standard => ("{\"type\":\"order.paid\",", "application/json", false),
        };
        assert!(seen.body.starts_with(body.as_bytes()), "{envelope:?}: {:?}", seen.body);
        assert_eq!(text(&seen.headers, "content-type").as_deref(), Some(content_type));
        assert_eq!(seen.headers.keys().any(|name| name.as_str().starts_with("ce-")), binary, "{envelope:?}");
        assert_eq!(text(&seen.headers, "webhook-id"), Some(event_id(1).to_string()));
    }
}

#[tokio::test]
async fn what_does_not_fit_the_envelope_is_not_sent() {
    let (target, url) = Target::ok().await;
    let bytes = NewEvent::new("t", &b"\xff"[..], "application/octet-stream");
    let standard = sink(HttpSinkConfig { envelope: Envelope::Standard, ..config(&url) });
    assert_eq!(short(&send(&standard, &delivery(1, bytes)).await), ("dead", "payload_not_json"));
    assert!(target.seen().is_empty());
}
