//! What is accepted and what is refused, each refusal with its code.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use postbox_webhook::standard::{SignKey, Signer, SigningKey, SymmetricKey, VerifyKey};
use postbox_webhook::{Headers, Request, UnixSeconds, Verify, github, plain, shopify, slack, standard, stripe};

const OLD: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const NEW: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const SEED: &str = "VEVTVFNJR05JTkdLRVlET05PVFVTRVRISVNGT1JBTlk=";
const ID: &str = "msg_1";
const TIME: &str = "1614265330";
const NOW: UnixSeconds = UnixSeconds(1_614_265_330);
const BODY: &[u8] = br#"{"test": 2432232314}"#;

/// `ok` or the refusal's code.
fn verdict(verifier: &dyn Verify, fields: &[(&str, &str)], body: &[u8], now: UnixSeconds) -> &'static str {
    let headers: Headers<'_> = fields.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
    verifier.verify(&Request::new(&headers, body), now).map_or_else(|refusal| refusal.code(), |_| "ok")
}

fn sign(keys: &[&str]) -> String {
    let keys = keys.iter().map(|key| SignKey::parse(key).expect("a key"));
    Signer::new(keys).expect("a signer").sign(ID, NOW, BODY).expect("signed").signature
}

fn standard(keys: &[&str]) -> standard::Verifier {
    standard::Verifier::new(keys.iter().map(|key| VerifyKey::parse(key).expect("a key"))).expect("a verifier")
}

fn standard_verdict(signature: &str) -> &'static str {
    let fields = [("webhook-id", ID), ("webhook-timestamp", TIME), ("webhook-signature", signature)];
    verdict(&standard(&[OLD]), &fields, BODY, NOW)
}

#[test]
fn keys_in_rotation() {
    let fields = |signature| [("webhook-id", ID), ("webhook-timestamp", TIME), ("webhook-signature", signature)];
    let (old, both) = (sign(&[OLD]), sign(&[NEW, OLD]));
    for (signature, keys, expected) in [
        (&old, &[OLD][..], "ok"),
        (&old, &[NEW, OLD], "ok"),
        (&both, &[OLD], "ok"),
        (&both, &[NEW], "ok"),
        (&old, &[NEW], "signature_mismatch"),
    ] {
        assert_eq!(verdict(&standard(keys), &fields(signature), BODY, NOW), expected, "{signature} against {keys:?}");
    }
}

#[test]
fn standard_signatures() {
    let right = sign(&[OLD]);
    let mac = right.strip_prefix("v1,").expect("a v1 entry");
    let seed: SigningKey = SigningKey::parse(SEED).expect("a key");
    let asymmetric = Signer::new([seed.into()]).expect("a signer").sign(ID, NOW, BODY).expect("signed").signature;
    let url_safe = mac.replace('+', "-").replace('/', "_");
    let hex: String = STANDARD.decode(mac).expect("base64").iter().map(|byte| format!("{byte:02x}")).collect();
    let stripe_way = {
        // The same secret derived as at the other provider: its text is the key.
        let key = SymmetricKey::from_bytes(OLD.as_bytes()).expect("a key");
        Signer::new([key.into()]).expect("a signer").sign(ID, NOW, BODY).expect("signed").signature
    };
    for (signature, expected) in [
        (right.clone(), "ok"),
        (format!("v1,{} {right}", STANDARD.encode([0; 32])), "ok"),
        (format!("v1,nonsense v9,future {right}"), "ok"),
        (format!("{right} {asymmetric}"), "ok"),
        (String::new(), "signature_malformed"),
        ("v1,".into(), "signature_malformed"),
        ("v1".into(), "signature_malformed"),
        (mac.into(), "signature_malformed"),
        (format!("v1,{}", &mac[..40]), "signature_malformed"),
        (format!("v1,{}", STANDARD.encode(&STANDARD.decode(mac).expect("base64")[..31])), "signature_malformed"),
        (format!("v1,{}", mac.trim_end_matches('=')), "signature_malformed"),
        (format!("v1,{mac}AAAA"), "signature_malformed"),
        (format!("v1,{hex}"), "signature_malformed"),
        (format!("v1,{url_safe}"), "signature_malformed"),
        (format!("v1, {mac}"), "signature_malformed"),
        (format!("{right} "), "signature_malformed"),
        (format!("v1a,{mac}"), "signature_malformed"),
        (format!("v2,{mac}"), "signature_version_unsupported"),
        (format!("V1,{mac}"), "signature_version_unsupported"),
        (format!(" ,{mac}"), "signature_malformed"),
        (asymmetric, "signature_mismatch"),
        (stripe_way, "signature_mismatch"),
        (format!("v1,{}", STANDARD.encode([0; 32])), "signature_mismatch"),
        ([right.as_str(); 17].join(" "), "signature_malformed"),
    ] {
        assert_eq!(standard_verdict(&signature), expected, "{signature}");
    }
}

#[test]
fn standard_ids_and_times() {
    // Signed by the reference as a sender of this would: the refusal is for the format, not for the
    // MAC.
    let reference = standardwebhooks::Webhook::new(OLD).expect("the reference takes the key");
    let forge = |id: &str, time: &str| reference.sign(id, time.parse().unwrap_or_default(), BODY).expect("signed");
    for (id, time, expected) in [
        (ID, TIME, "ok"),
        ("msg.1", TIME, "id_malformed"),
        ("", TIME, "id_malformed"),
        ("msg 1", TIME, "id_malformed"),
        (&"x".repeat(256), TIME, "id_malformed"),
        (ID, "", "timestamp_malformed"),
        (ID, "+1614265330", "timestamp_malformed"),
        (ID, "-1614265330", "timestamp_malformed"),
        (ID, " 1614265330", "timestamp_malformed"),
        (ID, "1614265330 ", "timestamp_malformed"),
        (ID, "1614265330.0", "timestamp_malformed"),
        (ID, "1.61426533e9", "timestamp_malformed"),
        (ID, "01614265330", "timestamp_malformed"),
        (ID, "99999999999999999999", "timestamp_malformed"),
        (ID, "1614265030", "ok"),
        (ID, "1614265029", "timestamp_too_old"),
        (ID, "1614265630", "ok"),
        (ID, "1614265631", "timestamp_too_new"),
    ] {
        let signature = forge(id, time);
        let fields = [("webhook-id", id), ("webhook-timestamp", time), ("webhook-signature", signature.as_str())];
        assert_eq!(verdict(&standard(&[OLD]), &fields, BODY, NOW), expected, "id {id:?}, time {time:?}");
    }
}

#[test]
fn a_stale_time_is_only_said_of_genuine_messages() {
    let wrong = sign(&[NEW]);
    let fields = [("webhook-id", ID), ("webhook-timestamp", TIME), ("webhook-signature", wrong.as_str())];
    assert_eq!(verdict(&standard(&[OLD]), &fields, BODY, UnixSeconds(0)), "signature_mismatch");
    assert_eq!(verdict(&standard(&[NEW]), &fields, BODY, UnixSeconds(0)), "timestamp_too_new");
}

#[test]
fn headers_of_the_standard_scheme() {
    let right = sign(&[OLD]);
    let (id, time, signature) =
        (("webhook-id", ID), ("webhook-timestamp", TIME), ("webhook-signature", right.as_str()));
    let svix = [("svix-id", ID), ("svix-timestamp", TIME), ("svix-signature", right.as_str())];
    let other_time = ("webhook-timestamp", "1614265331");
    for (fields, expected) in [
        (vec![id, time, signature], "ok"),
        (vec![("Webhook-Id", ID), ("WEBHOOK-TIMESTAMP", TIME), signature], "ok"),
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
        assert_eq!(verdict(&standard(&[OLD]), &fields, BODY, NOW), expected, "{fields:?}");
    }
}

#[test]
fn a_changed_or_reserialised_body_is_refused() {
    let right = sign(&[OLD]);
    let fields = [("webhook-id", ID), ("webhook-timestamp", TIME), ("webhook-signature", right.as_str())];
    for body in [&b"{\"test\":2432232314}"[..], b"{\"test\": 2432232314}\n", b"", b"{\"test\": 2432232315}"] {
        assert_eq!(verdict(&standard(&[OLD]), &fields, body, NOW), "signature_mismatch");
    }
}

#[test]
fn a_body_that_looks_like_a_timestamp_has_one_reading_only() {
    // `a.1.2.x` must not have two readings: ("a", 1, "2.x") and ("a.1", 2, "x").
    let signer = Signer::new([SignKey::parse(OLD).expect("a key")]).expect("a signer");
    let signed = signer.sign("a", UnixSeconds(1), b"2.x").expect("signed").signature;
    let shifted = [("webhook-id", "a.1"), ("webhook-timestamp", "2"), ("webhook-signature", signed.as_str())];
    assert_eq!(verdict(&standard(&[OLD]), &shifted, b"x", UnixSeconds(2)), "id_malformed");
    assert!(signer.sign("a.1", UnixSeconds(2), b"x").is_err());
}

#[test]
fn what_cannot_be_verified_is_not_signed() {
    let signer = Signer::new([SignKey::parse(OLD).expect("a key")]).expect("a signer");
    for (id, time) in [("", 1), ("a.b", 1), ("a b", 1), ("é", 1), ("a", -1), ("a", 1_000_000_000_000), ("a", i64::MIN)]
    {
        assert!(signer.sign(id, UnixSeconds(time), BODY).is_err(), "{id:?} {time}");
    }
}

/// The signature with an endpoint secret as at Stripe, over `time.body`.
fn stripe_mac(secret: &str, time: &str, body: &[u8]) -> String {
    let layout = plain::Layout::new("s");
    let message = [time.as_bytes(), b".", body].concat();
    let signer = plain::Signer::new(plain::Secret::new(secret).expect("a secret"), layout).expect("a signer");
    signer.sign(NOW, &message).expect("signed").remove(0).1
}

#[test]
fn stripe() {
    let verifier = stripe::Verifier::new([stripe::Secret::new(OLD).expect("a secret")]).expect("a verifier");
    let mac = stripe_mac(OLD, TIME, BODY);
    let other = stripe_mac(NEW, TIME, BODY);
    let early = stripe_mac(OLD, "1614265029", BODY);
    let standard_way = {
        let right = sign(&[OLD]);
        let raw = STANDARD.decode(right.strip_prefix("v1,").expect("v1")).expect("base64");
        raw.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    for (header, expected) in [
        (format!("t={TIME},v1={mac}"), "ok"),
        (format!("v1={mac},t={TIME}"), "ok"),
        (format!("t={TIME},v1={other},v1={mac},v0=junk"), "ok"),
        (format!("t={TIME},v1={other}"), "signature_mismatch"),
        (format!("t={TIME},v1={standard_way}"), "signature_mismatch"),
        (format!("t={TIME},v0={mac}"), "signature_version_unsupported"),
        (format!("t={TIME}"), "signature_version_unsupported"),
        (format!("v1={mac}"), "timestamp_missing"),
        (format!("t={TIME},t={TIME},v1={mac}"), "timestamp_duplicate"),
        (format!("t= {TIME},v1={mac}"), "timestamp_malformed"),
        (format!("t={TIME}, v1={mac}"), "signature_version_unsupported"),
        (format!("t={TIME},v1={}", mac.to_uppercase()), "signature_malformed"),
        (format!("t={TIME},v1={}", &mac[..62]), "signature_malformed"),
        (format!("t={TIME},v1="), "signature_malformed"),
        ("nonsense".into(), "signature_malformed"),
        (format!("t=1614265029,v1={early}"), "timestamp_too_old"),
    ] {
        assert_eq!(verdict(&verifier, &[("Stripe-Signature", &header)], BODY, NOW), expected, "{header}");
    }
    assert!(stripe::Secret::new("not-a-stripe-secret").is_err());
}

#[test]
fn github_and_shopify() {
    let secret = "0123456789abcdef";
    let hex = {
        let signer = plain::Signer::new(plain::Secret::new(secret).expect("a secret"), plain::Layout::new("s"));
        signer.expect("a signer").sign(NOW, BODY).expect("signed").remove(0).1
    };
    let github = github::Verifier::new([github::Secret::new(secret).expect("a secret")]).expect("a verifier");
    for (name, value, expected) in [
        ("X-Hub-Signature-256", format!("sha256={hex}"), "ok"),
        ("X-Hub-Signature-256", format!("sha1={hex}"), "signature_version_unsupported"),
        ("X-Hub-Signature-256", hex.clone(), "signature_version_unsupported"),
        ("X-Hub-Signature-256", "sha256=".into(), "signature_malformed"),
        ("X-Hub-Signature-256", format!("sha256={}", &hex[..40]), "signature_malformed"),
        // There is no fallback to SHA-1.
        ("X-Hub-Signature", format!("sha1={}", &hex[..40]), "signature_missing"),
    ] {
        assert_eq!(verdict(&github, &[(name, &value)], BODY, NOW), expected, "{name}: {value}");
    }
    let shopify = shopify::Verifier::new([shopify::Secret::new(secret).expect("a secret")]).expect("a verifier");
    let bytes: Vec<u8> = (0..64).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex")).collect();
    for (value, expected) in [
        (STANDARD.encode(&bytes), "ok"),
        (hex.clone(), "signature_malformed"),
        (STANDARD.encode(&bytes[..31]), "signature_malformed"),
        (STANDARD.encode([0; 32]), "signature_mismatch"),
    ] {
        assert_eq!(verdict(&shopify, &[("X-Shopify-Hmac-SHA256", &value)], BODY, NOW), expected, "{value}");
    }
}

#[test]
fn slack_and_its_versions() {
    let secret = "8f742231b10e8888abcd99yyyzzz85a5";
    let verifier = slack::Verifier::new([slack::Secret::new(secret).expect("a secret")]).expect("a verifier");
    let message = [b"v0:", TIME.as_bytes(), b":", BODY].concat();
    let signer = plain::Signer::new(plain::Secret::new(secret).expect("a secret"), plain::Layout::new("s"));
    let mac = signer.expect("a signer").sign(NOW, &message).expect("signed").remove(0).1;
    let time = ("X-Slack-Request-Timestamp", TIME);
    let right = format!("v0={mac}");
    let next = format!("v1={mac}");
    let signature = |value| ("X-Slack-Signature", value);
    for (fields, now, expected) in [
        (vec![time, signature(right.as_str())], NOW, "ok"),
        (vec![time, signature(right.as_str())], UnixSeconds(NOW.0 + 300), "ok"),
        (vec![time, signature(right.as_str())], UnixSeconds(NOW.0 + 301), "timestamp_too_old"),
        (vec![time, signature(next.as_str())], NOW, "signature_version_unsupported"),
        (vec![signature(right.as_str())], NOW, "timestamp_missing"),
        (vec![time, time, signature(right.as_str())], NOW, "timestamp_duplicate"),
        (vec![("X-Slack-Request-Timestamp", "1614265331"), signature(right.as_str())], NOW, "signature_mismatch"),
    ] {
        assert_eq!(verdict(&verifier, &fields, BODY, now), expected, "{fields:?}");
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
