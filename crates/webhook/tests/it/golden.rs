//! Published vectors, and fixtures made by an independent implementation (`fixtures/generate.py`).

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use postbox_webhook::standard::{PublicKey, SignKey, Signer, SigningKey, SymmetricKey, VerifyKey};
use postbox_webhook::{Headers, Refusal, Request, UnixSeconds, Verified, Verify};
use postbox_webhook::{github, plain, shopify, slack, standard, stripe, twilio};
use std::collections::BTreeMap;

const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
const TIME: UnixSeconds = UnixSeconds(1_614_265_330);
const BODY: &[u8] = br#"{"test": 2432232314}"#;
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const SEED: &str = "VEVTVFNJR05JTkdLRVlET05PVFVTRVRISVNGT1JBTlk=";
const V1: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
const V1A: &str = "v1a,tQ9V2XOqn7jL/DQenEFpqIugdBVtiMmER5mhSkXBNwM0mkATuDe6KYYUuxqtaiHeYGb7KaaBRdM5WqyeFiL8Ag==";

fn check(verifier: &dyn Verify, fields: &[(&str, &str)], body: &[u8], now: UnixSeconds) -> Result<Verified, Refusal> {
    let headers: Headers<'_> = fields.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
    verifier.verify(&Request::new(&headers, body), now)
}

#[test]
fn standard_webhooks_symmetric() {
    let signer = Signer::new([SignKey::parse(SECRET).expect("a key")]).expect("a signer");
    let signed = signer.sign(ID, TIME, BODY).expect("signed");
    assert_eq!(signed.signature, V1);
    let verifier = standard::Verifier::new([SymmetricKey::parse(SECRET).expect("a key").into()]).expect("a verifier");
    let verified = check(&verifier, &signed.headers(), BODY, TIME).expect("genuine");
    assert_eq!(verified, Verified { message_id: Some(ID.into()), signed_at: Some(TIME), digest: None, key: 0 });
}

#[test]
fn standard_webhooks_asymmetric() {
    let key = SigningKey::parse(SEED).expect("a key");
    let public = PublicKey::parse(&key.public_key().to_string()).expect("the public half");
    let signed = Signer::new([key.into()]).expect("a signer").sign(ID, TIME, BODY).expect("signed");
    assert_eq!(signed.signature, V1A);
    let verifier = standard::Verifier::new([public.into()]).expect("a verifier");
    assert!(check(&verifier, &signed.headers(), BODY, TIME).is_ok());
}

#[test]
fn github_example() {
    let key = github::Secret::new("It's a Secret to Everybody").expect("a secret");
    let verifier = github::Verifier::new([key]).expect("a verifier");
    let signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
    assert!(check(&verifier, &[("X-Hub-Signature-256", signature)], b"Hello, World!", TIME).is_ok());
}

#[test]
fn slack_example() {
    let body = "token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c";
    let key = slack::Secret::new("8f742231b10e8888abcd99yyyzzz85a5").expect("a secret");
    let verifier = slack::Verifier::new([key]).expect("a verifier");
    let fields = [
        ("X-Slack-Request-Timestamp", "1531420618"),
        ("X-Slack-Signature", "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"),
    ];
    assert!(check(&verifier, &fields, body.as_bytes(), UnixSeconds(1_531_420_618)).is_ok());
}

fn verifier_of(scheme: &str, secret: &str) -> Box<dyn Verify> {
    match scheme {
        "standard-webhooks" => {
            Box::new(standard::Verifier::new([VerifyKey::parse(secret).expect("a key")]).expect("a verifier"))
        }
        "stripe" => Box::new(stripe::Verifier::new([stripe::Secret::new(secret).expect("a key")]).expect("a verifier")),
        "slack" => Box::new(slack::Verifier::new([slack::Secret::new(secret).expect("a key")]).expect("a verifier")),
        "github" => Box::new(github::Verifier::new([github::Secret::new(secret).expect("a key")]).expect("a verifier")),
        "shopify" => {
            Box::new(shopify::Verifier::new([shopify::Secret::new(secret).expect("a key")]).expect("a verifier"))
        }
        "hmac" | "hmac-timed" => {
            let mut layout = plain::Layout::new("X-Sig");
            if scheme == "hmac-timed" {
                layout.prefix = "h=".into();
                layout.hash = plain::Hash::Sha512;
                layout.encoding = plain::Encoding::Base64;
                layout.timestamp_header = Some("X-Time".into());
                layout.separator = ":".into();
            }
            Box::new(plain::Verifier::new([plain::Secret::new(secret).expect("a key")], layout).expect("a verifier"))
        }
        other => panic!("the fixtures name {other}, which this test does not know"),
    }
}

#[test]
fn signatures_of_an_independent_implementation_are_accepted_and_belong_to_one_scheme_only() {
    let fixtures: serde_json::Value = serde_json::from_str(include_str!("../fixtures/signatures.json")).expect("JSON");
    let cases = fixtures.as_array().expect("a list");
    assert!(cases.len() > 100);
    for case in cases {
        let text = |name: &str| case[name].as_str().expect("a text").to_owned();
        let body = STANDARD.decode(text("body")).expect("base64");
        let fields: BTreeMap<String, String> = serde_json::from_value(case["headers"].clone()).expect("headers");
        let fields: Vec<(&str, &str)> = fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let now = UnixSeconds(case["time"].as_i64().expect("a time"));
        let verifier = verifier_of(&text("scheme"), &text("secret"));
        let verified = check(&*verifier, &fields, &body, now);
        assert!(verified.is_ok(), "{case}: {verified:?}");
        for other in ["standard-webhooks", "stripe", "slack", "github", "shopify", "hmac"] {
            if other != text("scheme") && !(other == "hmac" && text("scheme") == "hmac-timed") {
                let secret = format!("whsec_{}", STANDARD.encode([7; 24]));
                assert!(check(&*verifier_of(other, &secret), &fields, &body, now).is_err(), "{other} accepted {case}");
            }
        }
    }
}

/// Our test signers sign like the independent implementation.
#[test]
fn senders_for_tests_sign_as_their_providers_do() {
    let fixtures: serde_json::Value = serde_json::from_str(include_str!("../fixtures/signatures.json")).expect("JSON");
    let mut seen = BTreeMap::new();
    for case in fixtures.as_array().expect("a list") {
        let text = |name: &str| case[name].as_str().expect("a text").to_owned();
        let (body, secret) = (STANDARD.decode(text("body")).expect("base64"), text("secret"));
        let now = UnixSeconds(case["time"].as_i64().expect("a time"));
        let signed = match text("scheme").as_str() {
            "stripe" => stripe::Secret::new(&secret).expect("a key").sign(now, &body),
            "slack" => slack::Secret::new(&secret).expect("a key").sign(now, &body),
            "github" => github::Secret::new(&secret).expect("a key").sign(&body),
            "shopify" => shopify::Secret::new(&secret).expect("a key").sign(&body),
            _ => continue,
        };
        let theirs: BTreeMap<String, String> = serde_json::from_value(case["headers"].clone()).expect("headers");
        let theirs = theirs.into_iter().map(|(name, value)| (name.to_lowercase(), value));
        assert_eq!(signed.into_iter().collect::<BTreeMap<_, _>>(), theirs.collect(), "{case}");
        *seen.entry(text("scheme")).or_insert(0) += 1;
    }
    assert!(seen.len() == 4 && seen.values().all(|count| *count > 5), "{seen:?}");
}

#[test]
fn a_form_signed_for_tests_is_one_of_twilios() {
    let secret = || twilio::Secret::new("an auth token of an account").expect("a key");
    let (url, form) = ("https://example.org/in/twilio", b"To=%2B1&From=%2B2&Body=a+b&To=%2B3".as_slice());
    let verifier = twilio::Verifier::new([secret()], url).expect("a verifier");
    for query in [None, Some("a=1&b=2")] {
        let called = query.map_or_else(|| url.to_owned(), |query| format!("{url}?{query}"));
        let signed = secret().sign(&called, form);
        let headers = || signed.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        let verify = |body| verifier.verify(&Request { headers: &headers(), query, body }, UnixSeconds(0));
        assert!(verify(form).is_ok());
        assert_eq!(verify(b"To=%2B1"), Err(Refusal::Mismatch));
    }
}
