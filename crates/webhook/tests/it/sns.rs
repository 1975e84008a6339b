//! AWS SNS: messages signed by openssl (`fixtures/sns.py`), and everything that is refused, with
//! its code.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use postbox_webhook::sns::{
    Certificate, CertificateError, CertificateUrl, Confirmation, Message, TOLERANCE, TopicArn, Verifier,
};
use postbox_webhook::{Refusal, Tolerance, UnixSeconds};
use ring::signature::RsaKeyPair;
use serde_json::{Value, json};

use crate::senders::Kit;

const MESSAGES: &str = include_str!("../fixtures/sns/messages.json");
const SIGNING: &[u8] = include_bytes!("../fixtures/sns/signing.pem");
const SIGNING_KEY: &str = include_str!("../fixtures/sns/signing-key.pem");
const OTHER: &[u8] = include_bytes!("../fixtures/sns/other.pem");
const WEAK: &[u8] = include_bytes!("../fixtures/sns/weak.pem");
const ELLIPTIC: &[u8] = include_bytes!("../fixtures/sns/elliptic.pem");

const HOST: &str = "https://sns.eu-central-1.amazonaws.com";
const URL: &str =
    "https://sns.eu-central-1.amazonaws.com/SimpleNotificationService-0123456789abcdef0123456789abcdef.pem";
const TOPIC: &str = "arn:aws:sns:eu-central-1:123456789012:orders";
const ID: &str = "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324";
/// 2030-01-01T00:00:00Z, the time of every fixture.
const NOW: UnixSeconds = UnixSeconds(1_893_456_000);

fn certificate(pem: &[u8]) -> Certificate {
    Certificate::from_pem(&CertificateUrl::parse(URL).expect("a URL"), pem).expect("a certificate")
}

fn verifier() -> Verifier {
    Verifier::new([TopicArn::parse(TOPIC).expect("a topic")]).expect("a verifier")
}

fn verify(body: &[u8], now: UnixSeconds) -> Result<Message, Refusal> {
    verifier().read(body)?.verify(&certificate(SIGNING), now)
}

/// `ok` or the refusal's code.
fn verdict(body: &[u8], now: UnixSeconds) -> &'static str {
    verify(body, now).map_or_else(Refusal::code, |_| "ok")
}

fn fixture(name: &str) -> String {
    let cases: Vec<BTreeMap<String, String>> = serde_json::from_str(MESSAGES).expect("JSON");
    let case = cases.into_iter().find(|case| case["name"] == name).expect("a case of that name");
    case["body"].clone()
}

/// The sender's side: signs a notification or confirmation, even with invalid fields.
pub(crate) fn signed(mut message: Value) -> String {
    let names: &[&str] = match message["Type"].as_str() {
        Some("Notification") => &["Message", "MessageId", "Subject", "Timestamp", "TopicArn", "Type"],
        _ => &["Message", "MessageId", "SubscribeURL", "Timestamp", "Token", "TopicArn", "Type"],
    };
    let present = names.iter().filter_map(|name| message[*name].as_str().map(|value| format!("{name}\n{value}\n")));
    message["Signature"] = json!(signature(&present.collect::<String>()));
    message.to_string()
}

fn signature(text: &str) -> String {
    let base64: String = SIGNING_KEY.lines().filter(|line| !line.starts_with('-')).collect();
    let key = RsaKeyPair::from_pkcs8(&STANDARD.decode(base64).expect("base64")).expect("a key");
    let mut signature = vec![0; key.public().modulus_len()];
    let random = ring::rand::SystemRandom::new();
    key.sign(&ring::signature::RSA_PKCS1_SHA256, &random, text.as_bytes(), &mut signature).expect("signed");
    STANDARD.encode(signature)
}

fn notification() -> Value {
    json!({
        "Type": "Notification", "MessageId": ID, "TopicArn": TOPIC, "Message": "Hello!",
        "Timestamp": "2030-01-01T00:00:00.000Z", "SignatureVersion": "2", "SigningCertURL": URL,
    })
}

fn confirmation() -> Value {
    let mut message = notification();
    message["Type"] = json!("SubscriptionConfirmation");
    message["Token"] = json!("abc123");
    message["SubscribeURL"] = json!(format!("{HOST}/?Action=ConfirmSubscription&TopicArn={TOPIC}&Token=abc123"));
    message
}

fn with(mut message: Value, name: &str, value: impl Into<Value>) -> Value {
    message[name] = value.into();
    message
}

fn without(mut message: Value, name: &str) -> Value {
    message.as_object_mut().expect("an object").remove(name);
    message
}

#[test]
fn messages_signed_by_openssl_are_accepted() {
    let cases: Vec<BTreeMap<String, String>> = serde_json::from_str(MESSAGES).expect("JSON");
    assert_eq!(cases.len(), 10);
    for case in cases {
        let expected = if case["name"] == "version 1" { "signature_version_outdated" } else { "ok" };
        assert_eq!(verdict(case["body"].as_bytes(), NOW), expected, "{}", case["name"]);
    }
}

#[test]
fn each_kind_says_what_it_says() {
    let Ok(Message::Notification(it)) = verify(fixture("notification with a subject").as_bytes(), NOW) else {
        panic!("a notification");
    };
    assert_eq!((it.message_id.as_str(), it.topic_arn.as_str()), (ID, TOPIC));
    assert_eq!((it.subject.as_deref(), it.message.as_str()), (Some("My First Message"), "Hello!"));
    assert_eq!(it.published_at, NOW);
    let confirms = |it: &Confirmation| it.subscribe_url.as_str().starts_with(&format!("{HOST}/?Action="));
    match verify(fixture("subscription").as_bytes(), NOW).expect("genuine") {
        Message::SubscriptionConfirmation(it) => {
            assert!(confirms(&it) && it.subscribe_url.as_str().contains(&it.token))
        }
        other => panic!("{other:?}"),
    }
    match verify(fixture("unsubscription").as_bytes(), NOW).expect("genuine") {
        Message::UnsubscribeConfirmation(it) => assert!(confirms(&it) && !format!("{it:?}").contains(&it.token)),
        other => panic!("{other:?}"),
    }
    let verified = verify(fixture("notification").as_bytes(), NOW).expect("genuine").verified();
    assert_eq!((verified.message_id.as_deref(), verified.signed_at, verified.key), (Some(ID), Some(NOW), 0));
}

#[test]
fn fields_of_a_notification() {
    let base = notification;
    for (message, expected) in [
        (base(), "ok"),
        (with(base(), "Subject", "s"), "ok"),
        (with(base(), "Subject", ""), "ok"),
        (with(base(), "Subject", Value::Null), "ok"),
        (with(base(), "Unknown", json!({"Message": [1]})), "ok"),
        (with(with(base(), "Token", 1), "SubscribeURL", "http://169.254.169.254/"), "ok"),
        (without(base(), "Message"), "field_missing"),
        (without(base(), "Type"), "field_missing"),
        (without(base(), "TopicArn"), "field_missing"),
        (without(base(), "SigningCertURL"), "field_missing"),
        (without(base(), "MessageId"), "id_missing"),
        (without(base(), "Timestamp"), "timestamp_missing"),
        (without(base(), "SignatureVersion"), "signature_missing"),
        (with(base(), "Message", 1), "field_malformed"),
        (with(base(), "Message", Value::Null), "field_malformed"),
        (with(base(), "Subject", 1), "field_malformed"),
        (with(base(), "Subject", "two\nlines"), "field_malformed"),
        (with(base(), "Type", "notification"), "field_malformed"),
        (with(base(), "Type", "Other"), "field_malformed"),
        (with(base(), "MessageId", ""), "id_malformed"),
        (with(base(), "MessageId", "a b"), "id_malformed"),
        (with(base(), "MessageId", "a\nb"), "id_malformed"),
        (with(base(), "MessageId", "x".repeat(256)), "id_malformed"),
        (with(base(), "Timestamp", "1893456000"), "timestamp_malformed"),
        (with(base(), "Timestamp", "2030-01-01T00:00:00.000+00:00"), "timestamp_malformed"),
        (with(base(), "Timestamp", " 2030-01-01T00:00:00.000Z"), "timestamp_malformed"),
        (with(base(), "Timestamp", "2030-01-01T00:00:00.000Z "), "timestamp_malformed"),
        (with(base(), "Timestamp", "+2030-01-01T00:00:00Z"), "timestamp_malformed"),
        (with(base(), "Timestamp", "-2030-01-01T00:00:00Z"), "timestamp_malformed"),
        (with(base(), "Timestamp", "1.893456e9"), "timestamp_malformed"),
        (with(base(), "Timestamp", "99999999999999999999"), "timestamp_malformed"),
        (with(base(), "Timestamp", "2030-01-01T00:00:00.00000000000000000000Z"), "timestamp_malformed"),
        (with(base(), "Timestamp", ""), "timestamp_malformed"),
        (with(base(), "Timestamp", NOW.0), "timestamp_malformed"),
        (with(base(), "SignatureVersion", "1"), "signature_version_outdated"),
        (with(base(), "SignatureVersion", "3"), "signature_version_unsupported"),
        (with(base(), "SignatureVersion", "2 "), "signature_version_unsupported"),
        (with(base(), "SignatureVersion", ""), "signature_version_unsupported"),
        (with(base(), "SignatureVersion", 2), "signature_malformed"),
        (with(base(), "TopicArn", format!("{TOPIC}2")), "topic_not_allowed"),
        (with(base(), "TopicArn", TOPIC.to_uppercase()), "topic_not_allowed"),
        (with(base(), "TopicArn", ""), "topic_not_allowed"),
        (with(base(), "SigningCertURL", "https://evil.example/a.pem"), "certificate_url_refused"),
        (with(base(), "SigningCertURL", format!("{URL}?a")), "certificate_url_refused"),
        (with(base(), "SigningCertURL", format!("{HOST}/another.pem")), "certificate_other"),
    ] {
        assert_eq!(verdict(signed(message.clone()).as_bytes(), NOW), expected, "{message}");
    }
}

#[test]
fn a_field_twice_is_refused_equal_or_not() {
    let body = signed(notification());
    let twice = |field: &str| format!("{{{field},{}", &body[1..]);
    for (field, expected) in [
        (r#""Message":"Hello!""#, "field_duplicate"),
        (r#""Message":"other""#, "field_duplicate"),
        (r#""\u004dessage":"other""#, "field_duplicate"),
        (r#""Type":"Notification""#, "field_duplicate"),
        (r#""TopicArn":"x""#, "field_duplicate"),
        (r#""SigningCertURL":"x""#, "field_duplicate"),
        (r#""Subject":"x","Subject":"x""#, "field_duplicate"),
        (r#""MessageId":"x""#, "id_duplicate"),
        (r#""Timestamp":"2030-01-01T00:00:00.000Z""#, "timestamp_duplicate"),
        (r#""Signature":"x""#, "signature_duplicate"),
        (r#""SignatureVersion":"2""#, "signature_duplicate"),
        (r#""message":"x","message":"y""#, "ok"),
    ] {
        assert_eq!(verdict(twice(field).as_bytes(), NOW), expected, "{field}");
    }
    assert_eq!(verdict(format!("{body}{body}").as_bytes(), NOW), "body_malformed");
    assert_eq!(verdict(b"Hello!", NOW), "body_malformed", "raw delivery");
}

#[test]
fn signatures() {
    let body = signed(notification());
    let message: Value = serde_json::from_str(&body).expect("JSON");
    let right = message["Signature"].as_str().expect("a text").to_owned();
    let raw = STANDARD.decode(&right).expect("base64");
    let hex: String = raw.iter().map(|byte| format!("{byte:02x}")).collect();
    for (signature, expected) in [
        (json!(right), "ok"),
        (json!(""), "signature_malformed"),
        (json!(" "), "signature_malformed"),
        (json!(Value::Null), "signature_malformed"),
        (json!(right.trim_end_matches('=')), "signature_malformed"),
        (json!(format!("{right}\n")), "signature_malformed"),
        (json!(right.replace('+', "-").replace('/', "_")), "signature_malformed"),
        (json!(STANDARD.encode(vec![1; 1_100])), "signature_malformed"),
        // It decodes, but has another length: RSA refuses it.
        (json!(hex), "signature_mismatch"),
        (json!(STANDARD.encode(&raw[..255])), "signature_mismatch"),
        (json!(STANDARD.encode([&raw[..], &[0]].concat())), "signature_mismatch"),
        (json!(STANDARD.encode([&[0], &raw[..]].concat())), "signature_mismatch"),
        (json!(STANDARD.encode([0; 256])), "signature_mismatch"),
        (json!(STANDARD.encode([0xff; 256])), "signature_mismatch"),
        (json!(signature("Message\nHello!\n")), "signature_mismatch"),
        // Valid codes of other schemes over the same body, in this encoding.
        (json!(STANDARD.encode(Kit::Shopify.code(b"0123456789abcdef", "", "", body.as_bytes()))), "signature_mismatch"),
        (json!(format!("v1,{right}")), "signature_malformed"),
        (json!(format!("{right} {right}")), "signature_malformed"),
        (json!(&right[..right.len() / 2]), "signature_mismatch"),
    ] {
        let body = with(message.clone(), "Signature", signature).to_string();
        assert_eq!(verdict(body.as_bytes(), NOW), expected, "{body}");
    }
    let by_another = verifier().read(body.as_bytes()).expect("well-formed").verify(&certificate(OTHER), NOW);
    assert_eq!(by_another, Err(Refusal::Mismatch));
}

#[test]
fn changing_what_is_signed_is_refused_and_what_is_not_is_never_handed_out() {
    let message: Value = serde_json::from_str(&signed(with(notification(), "Subject", "s"))).expect("JSON");
    let genuine = verify(message.to_string().as_bytes(), NOW).expect("genuine");
    for (changed, expected) in [
        (with(message.clone(), "Message", "Hello?"), "signature_mismatch"),
        (with(message.clone(), "MessageId", "other"), "signature_mismatch"),
        (with(message.clone(), "Subject", "t"), "signature_mismatch"),
        (without(message.clone(), "Subject"), "signature_mismatch"),
        (with(message.clone(), "Timestamp", "2030-01-01T00:00:00.001Z"), "signature_mismatch"),
        (with(message.clone(), "Type", "SubscriptionConfirmation"), "field_missing"),
    ] {
        assert_eq!(verdict(changed.to_string().as_bytes(), NOW), expected, "{changed}");
    }
    let unsigned = with(with(message, "UnsubscribeURL", "http://evil.example"), "Token", "evil");
    assert_eq!(verify(unsigned.to_string().as_bytes(), NOW), Ok(genuine));
}

#[test]
fn a_reserialised_body_is_the_same_message() {
    let message: Value = serde_json::from_str(&signed(with(notification(), "Message", "Zo\u{eb} /"))).expect("JSON");
    let genuine = verify(message.to_string().as_bytes(), NOW).expect("genuine");
    let pretty = serde_json::to_string_pretty(&message).expect("JSON");
    let escaped = message.to_string().replace('\u{eb}', "\\u00eb").replace('/', "\\/");
    let reordered: String = {
        let fields = message.as_object().expect("an object").iter().rev();
        let fields: Vec<String> = fields.map(|(name, value)| format!("{}:{value}", json!(name))).collect();
        format!("{{{}}}", fields.join(" , "))
    };
    for body in [pretty, escaped, reordered] {
        assert_eq!(verify(body.as_bytes(), NOW).as_ref(), Ok(&genuine), "{body}");
    }
}

#[test]
fn a_text_that_imitates_fields_has_one_reading() {
    // A published text that could pass for the fields of another message if subjects could contain
    // line breaks.
    let genuine = with(notification(), "Message", "pay 1\nMessageId\nfake\nSubject\nx");
    let genuine: Value = serde_json::from_str(&signed(genuine)).expect("JSON");
    assert_eq!(verdict(genuine.to_string().as_bytes(), NOW), "ok");
    let shifted = with(genuine, "Message", "pay 1");
    let shifted = with(shifted, "Subject", format!("x\nMessageId\n{ID}"));
    assert_eq!(verdict(with(shifted, "MessageId", "fake").to_string().as_bytes(), NOW), "field_malformed");
}

#[test]
fn confirmations_lead_to_aws_only() {
    let url = |url: &str| with(confirmation(), "SubscribeURL", url);
    for (message, expected) in [
        (confirmation(), "ok"),
        (with(confirmation(), "Type", "UnsubscribeConfirmation"), "ok"),
        (with(confirmation(), "Subject", 1), "ok"),
        (without(confirmation(), "Token"), "field_missing"),
        (without(confirmation(), "SubscribeURL"), "field_missing"),
        (with(confirmation(), "Token", "other"), "subscribe_url_refused"),
        (url("http://169.254.169.254/latest/meta-data/"), "subscribe_url_refused"),
        (
            url(&format!("{HOST}.evil.example/?Action=ConfirmSubscription&TopicArn={TOPIC}&Token=abc123")),
            "subscribe_url_refused",
        ),
        (url(&format!("{HOST}/?Action=ConfirmSubscription&TopicArn={TOPIC}2&Token=abc123")), "subscribe_url_refused"),
        (url(&format!("{HOST}/?Action=DeleteTopic&TopicArn={TOPIC}&Token=abc123")), "subscribe_url_refused"),
        // Genuine at AWS, but of a topic that belongs to somebody else.
        (with(confirmation(), "TopicArn", "arn:aws:sns:eu-central-1:999999999999:evil"), "topic_not_allowed"),
    ] {
        assert_eq!(verdict(signed(message.clone()).as_bytes(), NOW), expected, "{message}");
    }
    let unsigned = with(confirmation(), "Signature", STANDARD.encode([0; 256]));
    assert_eq!(verdict(unsigned.to_string().as_bytes(), NOW), "signature_mismatch");
}

#[test]
fn the_edges_of_time() {
    let body = signed(notification());
    let at = |offset: i64| verdict(body.as_bytes(), UnixSeconds(NOW.0 + offset));
    assert_eq!(at(0), "ok");
    assert_eq!(at(3_600), "ok", "the last of AWS's retries carries the time of publishing");
    assert_eq!(at(i64::from(TOLERANCE.past_s)), "ok");
    assert_eq!(at(i64::from(TOLERANCE.past_s) + 1), "timestamp_too_old");
    assert_eq!(at(-300), "ok");
    assert_eq!(at(-301), "timestamp_too_new");
    let strict = verifier().tolerance(Tolerance { past_s: 60, future_s: 0 });
    let at =
        |offset| strict.read(body.as_bytes())?.verify(&certificate(SIGNING), UnixSeconds(NOW.0 + offset)).map(drop);
    assert_eq!((at(60), at(61), at(-1)), (Ok(()), Err(Refusal::TooOld), Err(Refusal::TooNew)));
    // Only a genuine message is reported as stale.
    let forged = with(serde_json::from_str(&body).expect("JSON"), "Message", "x").to_string();
    assert_eq!(verdict(forged.as_bytes(), UnixSeconds(NOW.0 + 10_000)), "signature_mismatch");
}

#[test]
fn a_certificate_verifies_only_while_it_is_valid() {
    let (first, last) = certificate(SIGNING).validity();
    assert!(first < NOW && NOW < last);
    let verifier = verifier().tolerance(Tolerance { past_s: u32::MAX, future_s: u32::MAX });
    let body = signed(notification());
    let at = |now: i64| {
        let read = verifier.read(body.as_bytes()).expect("well-formed");
        read.verify(&certificate(SIGNING), UnixSeconds(now)).map_or_else(Refusal::code, |_| "ok")
    };
    assert_eq!([at(first.0), at(last.0)], ["ok"; 2]);
    assert_eq!([at(first.0 - 1), at(last.0 + 1), at(i64::MIN), at(i64::MAX)], ["certificate_expired"; 4]);
}

#[test]
fn only_one_strong_rsa_certificate_constructs() {
    let url = CertificateUrl::parse(URL).expect("a URL");
    let read = |pem: &[u8]| Certificate::from_pem(&url, pem).map(drop);
    let text = |pem: &[u8]| String::from_utf8(pem.to_vec()).expect("text");
    assert_eq!(read(format!("\n{}\r\n\n", text(SIGNING).replace('\n', "\r\n")).as_bytes()), Ok(()));
    assert_eq!(read(WEAK), Err(CertificateError::Key));
    assert_eq!(read(ELLIPTIC), Err(CertificateError::Key));
    for wrong in [
        String::new(),
        "<html>".into(),
        SIGNING_KEY.into(),
        text(SIGNING).replace("END", "ENDE"),
        text(&[SIGNING, OTHER].concat()),
        format!("subject\n{}", text(SIGNING)),
        text(SIGNING).replacen("MII", "MI!", 1),
        format!("{}{}", " ".repeat(17_000), text(SIGNING)),
    ] {
        assert_eq!(read(wrong.as_bytes()), Err(CertificateError::Pem), "{wrong}");
    }
    let key_as_certificate = SIGNING_KEY.replace("PRIVATE KEY", "CERTIFICATE");
    assert_eq!(read(key_as_certificate.as_bytes()), Err(CertificateError::Certificate));
    assert_eq!(read(b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"), Err(CertificateError::Certificate));
}

#[test]
fn a_verifier_of_no_topic_does_not_construct() {
    assert!(Verifier::new([]).is_err());
}
