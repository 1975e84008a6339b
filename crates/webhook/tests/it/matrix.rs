//! Bad input that exists in one scheme only: its headers, its list of signatures, its layout.
//! `bad_input.rs` has the rest.

use postbox_webhook::standard::{SignKey, Signer};
use postbox_webhook::{Headers, Request, UnixSeconds, Verify, plain, stripe};

use crate::senders::{ID, Kit, OTHER, SECRET, TIME};

const NOW: UnixSeconds = UnixSeconds(TIME);
const BODY: &[u8] = br#"{"test": 2432232314}"#;

/// `ok` or the refusal's code.
fn verdict(verifier: &dyn Verify, fields: &[(&str, &str)], body: &[u8], now: UnixSeconds) -> &'static str {
    let headers: Headers<'_> = fields.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
    verifier.verify(&Request::new(&headers, body), now).map_or_else(|refusal| refusal.code(), |_| "ok")
}

fn signer(keys: &[&str]) -> Signer {
    Signer::new(keys.iter().map(|key| SignKey::parse(key).expect("a key"))).expect("a signer")
}

#[test]
fn lists_and_versions_of_one_scheme() {
    let sign = |kit: Kit, secret: &str| kit.signature(secret, ID, &TIME.to_string(), kit.body());
    let (right, public) = (sign(Kit::Standard, SECRET), sign(Kit::StandardPublic, SECRET));
    let (v1, other, github) = (sign(Kit::Stripe, SECRET), sign(Kit::Stripe, OTHER), sign(Kit::GitHub, SECRET));
    let mac = right.strip_prefix("v1,").expect("a v1 entry");
    let hex = github.strip_prefix("sha256=").expect("its version");
    for (kit, header, expected) in [
        (Kit::Standard, format!("v1,nonsense v9,future {right}"), "ok"),
        (Kit::Standard, format!("{right} {public}"), "ok"),
        (Kit::Standard, public.clone(), "signature_mismatch"),
        (Kit::Standard, "v1".into(), "signature_malformed"),
        (Kit::Standard, mac.into(), "signature_malformed"),
        (Kit::Standard, format!("v1,{mac}AAAA"), "signature_malformed"),
        (Kit::Standard, format!("v1, {mac}"), "signature_malformed"),
        (Kit::Standard, format!("v1a,{mac}"), "signature_malformed"),
        (Kit::Standard, format!(" ,{mac}"), "signature_malformed"),
        (Kit::Standard, [right.as_str(); 17].join(" "), "signature_malformed"),
        (Kit::Stripe, format!("{v1},t={TIME}"), "ok"),
        (Kit::Stripe, format!("t={TIME},{other},{v1},v0=junk"), "ok"),
        (Kit::Stripe, format!("t={TIME}"), "signature_version_unsupported"),
        (Kit::Stripe, format!("t={TIME}, {v1}"), "signature_version_unsupported"),
        (Kit::Stripe, v1.clone(), "timestamp_missing"),
        (Kit::Stripe, "nonsense".into(), "signature_malformed"),
        (Kit::GitHub, hex.into(), "signature_version_unsupported"),
        (Kit::GitHub, format!("sha256={}", &hex[..40]), "signature_malformed"),
    ] {
        let mut message = kit.genuine(SECRET, TIME, kit.body());
        message.fields.last_mut().expect("the signature is last").1 = header.into_bytes();
        assert_eq!(message.verdict(&*kit.verifier(), TIME), expected, "{kit:?}: {message:?}");
    }
    // There is no fallback to SHA-1.
    let sha1 = format!("sha1={}", &hex[..40]);
    let verdict = verdict(&*Kit::GitHub.verifier(), &[("X-Hub-Signature", &sha1)], Kit::GitHub.body(), NOW);
    assert_eq!(verdict, "signature_missing");
    assert!(stripe::Secret::new("not-a-stripe-secret").is_err());
}

#[test]
fn headers_of_the_standard_scheme() {
    // Signed with two keys, of which the receiver has one.
    let signed = signer(&[OTHER, SECRET]).sign(ID, NOW, BODY).expect("signed");
    let [id, time, signature] = signed.headers();
    let svix = [("svix-id", id.1), ("svix-timestamp", time.1), ("svix-signature", signature.1)];
    let other_time = ("webhook-timestamp", "1893456001");
    let verifier = Kit::Standard.verifier();
    for (fields, expected) in [
        (vec![id, time, signature], "ok"),
        (vec![("Webhook-Id", id.1), ("WEBHOOK-TIMESTAMP", time.1), signature], "ok"),
        (svix.to_vec(), "ok"),
        ([vec![id, time, signature], svix.to_vec()].concat(), "ok"),
        (vec![time, signature], "id_missing"),
        (vec![id, signature], "timestamp_missing"),
        (vec![id, time], "signature_missing"),
        (vec![], "id_missing"),
        // Families are never mixed.
        (vec![id, svix[1], svix[2]], "timestamp_missing"),
        (vec![id, time, svix[2]], "signature_missing"),
        (vec![svix[0], time, signature], "id_missing"),
        // A repeated header is refused, equal or not.
        (vec![id, time, time, signature], "timestamp_duplicate"),
        (vec![id, time, other_time, signature], "timestamp_duplicate"),
        (vec![id, id, time, signature], "id_duplicate"),
        (vec![id, time, signature, signature], "signature_duplicate"),
    ] {
        assert_eq!(verdict(&*verifier, &fields, BODY, NOW), expected, "{fields:?}");
    }
}

#[test]
fn a_body_that_looks_like_a_timestamp_has_one_reading_only() {
    // `a.1.2.x` must not have two readings: ("a", 1, "2.x") and ("a.1", 2, "x").
    let signer = signer(&[SECRET]);
    let signed = signer.sign("a", UnixSeconds(1), b"2.x").expect("signed").signature;
    let shifted = [("webhook-id", "a.1"), ("webhook-timestamp", "2"), ("webhook-signature", signed.as_str())];
    assert_eq!(verdict(&*Kit::Standard.verifier(), &shifted, b"x", UnixSeconds(2)), "id_malformed");
    assert!(signer.sign("a.1", UnixSeconds(2), b"x").is_err());
}

#[test]
fn what_cannot_be_verified_is_not_signed() {
    let signer = signer(&[SECRET]);
    for (id, time) in [("", 1), ("a.b", 1), ("a b", 1), ("é", 1), ("a", -1), ("a", 1_000_000_000_000), ("a", i64::MIN)]
    {
        assert!(signer.sign(id, UnixSeconds(time), BODY).is_err(), "{id:?} {time}");
    }
}

#[test]
fn a_plain_layout_that_is_ambiguous_does_not_construct() {
    let secret = || plain::Secret::new("0123456789abcdef").expect("a secret");
    let with = |separator: &str| plain::Layout {
        timestamp_header: Some("t".into()),
        separator: separator.into(),
        ..plain::Layout::new("s")
    };
    assert!(plain::Verifier::new([secret()], with("")).is_err());
    assert!(plain::Verifier::new([secret()], with("0")).is_err());
    assert!(plain::Verifier::new([secret()], plain::Layout::new("")).is_err());
    let verifier = plain::Verifier::new([secret()], with(".")).expect("a verifier");
    let signed = plain::Signer::new(secret(), with(".")).expect("a signer").sign(NOW, BODY).expect("signed");
    let fields: Vec<(&str, &str)> = signed.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(verdict(&verifier, &fields, BODY, NOW), "ok");
    assert_eq!(verdict(&verifier, &fields[..1], BODY, NOW), "timestamp_missing");
}
