//! Random inputs: no mutation is accepted, nothing panics, and an independent implementation always agrees.

use std::time::{SystemTime, UNIX_EPOCH};

use postbox_webhook::standard::{SignKey, Signer, SymmetricKey};
use postbox_webhook::{Headers, Request, UnixSeconds, Verify, github, plain, shopify, slack, standard, stripe};
use proptest::prelude::*;

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const TEXT: &str = "whsec_0123456789abcdef";

type Fields = Vec<(String, Vec<u8>)>;

/// A scheme, and how its sender signs.
struct Subject {
    name: &'static str,
    verifier: Box<dyn Verify>,
    sign: fn(i64, &[u8]) -> Fields,
}

fn plain_mac(layout: plain::Layout, message: &[u8]) -> String {
    let signer = plain::Signer::new(plain::Secret::new(TEXT).expect("a secret"), layout).expect("a signer");
    signer.sign(UnixSeconds(0), message).expect("signed").remove(0).1
}

fn hex(message: &[u8]) -> String {
    plain_mac(plain::Layout::new("s"), message)
}

fn subjects() -> Vec<Subject> {
    vec![
        Subject {
            name: "standard-webhooks",
            verifier: Box::new(
                standard::Verifier::new([SymmetricKey::parse(SECRET).expect("a key").into()]).expect("a verifier"),
            ),
            sign: |time, body| {
                let signer = Signer::new([SignKey::parse(SECRET).expect("a key")]).expect("a signer");
                let signed = signer.sign("msg_1", UnixSeconds(time), body).expect("signed");
                signed.headers().map(|(name, value)| (name.to_owned(), value.as_bytes().to_vec())).to_vec()
            },
        },
        Subject {
            name: "stripe",
            verifier: Box::new(stripe::Verifier::new([stripe::Secret::new(TEXT).expect("a key")]).expect("a verifier")),
            sign: |time, body| {
                let mac = hex(&[time.to_string().as_bytes(), b".", body].concat());
                vec![("stripe-signature".into(), format!("t={time},v1={mac}").into_bytes())]
            },
        },
        Subject {
            name: "slack",
            verifier: Box::new(slack::Verifier::new([slack::Secret::new(TEXT).expect("a key")]).expect("a verifier")),
            sign: |time, body| {
                let mac = hex(&[b"v0:", time.to_string().as_bytes(), b":", body].concat());
                vec![
                    ("x-slack-request-timestamp".into(), time.to_string().into_bytes()),
                    ("x-slack-signature".into(), format!("v0={mac}").into_bytes()),
                ]
            },
        },
        Subject {
            name: "github",
            verifier: Box::new(github::Verifier::new([github::Secret::new(TEXT).expect("a key")]).expect("a verifier")),
            sign: |_, body| vec![("x-hub-signature-256".into(), format!("sha256={}", hex(body)).into_bytes())],
        },
        Subject {
            name: "shopify",
            verifier: Box::new(
                shopify::Verifier::new([shopify::Secret::new(TEXT).expect("a key")]).expect("a verifier"),
            ),
            sign: |_, body| {
                let layout = plain::Layout { encoding: plain::Encoding::Base64, ..plain::Layout::new("s") };
                vec![("x-shopify-hmac-sha256".into(), plain_mac(layout, body).into_bytes())]
            },
        },
        Subject {
            name: "hmac",
            verifier: Box::new(
                plain::Verifier::new([plain::Secret::new(TEXT).expect("a key")], plain::Layout::new("x-sig"))
                    .expect("a verifier"),
            ),
            sign: |_, body| vec![("x-sig".into(), hex(body).into_bytes())],
        },
    ]
}

fn accepts(verifier: &dyn Verify, fields: &Fields, body: &[u8], now: i64) -> bool {
    let headers: Headers<'_> = fields.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect();
    verifier.verify(&Request::new(&headers, body), UnixSeconds(now)).is_ok()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every single-bit flip of every header value and of the body, one by one.
    #[test]
    fn no_single_bit_flip_is_accepted(body in proptest::collection::vec(any::<u8>(), 0..48), time in 1_000_000_000_i64..2_000_000_000) {
        for subject in subjects() {
            let mut fields = (subject.sign)(time, &body);
            prop_assert!(accepts(&*subject.verifier, &fields, &body, time), "{} refuses its own", subject.name);
            for field in 0..fields.len() {
                for bit in 0..fields[field].1.len() * 8 {
                    fields[field].1[bit / 8] ^= 1 << (bit % 8);
                    prop_assert!(!accepts(&*subject.verifier, &fields, &body, time), "{}: header {field}, bit {bit}", subject.name);
                    fields[field].1[bit / 8] ^= 1 << (bit % 8);
                }
            }
            let mut changed = body.clone();
            for bit in 0..body.len() * 8 {
                changed[bit / 8] ^= 1 << (bit % 8);
                prop_assert!(!accepts(&*subject.verifier, &fields, &changed, time), "{}: body bit {bit}", subject.name);
                changed[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// A byte replaced, taken away, put in, or the tail cut off, anywhere.
    #[test]
    fn no_byte_mutation_is_accepted(
        body in proptest::collection::vec(any::<u8>(), 0..64),
        place in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        kind in 0..4_u8,
    ) {
        let time = 1_614_265_330;
        for subject in subjects() {
            let genuine = (subject.sign)(time, &body);
            let targets = genuine.len() + 1;
            for target in 0..targets {
                let mut fields = genuine.clone();
                let mut changed = body.clone();
                let bytes = if target < fields.len() { &mut fields[target].1 } else { &mut changed };
                let at = place.index(bytes.len() + 1);
                match kind {
                    0 if at < bytes.len() => bytes[at] = byte,
                    1 if at < bytes.len() => drop(bytes.remove(at)),
                    2 => bytes.insert(at, byte),
                    _ => bytes.truncate(at),
                }
                if fields == genuine && changed == body {
                    continue;
                }
                // An unknown version beside the right one is allowed in Stripe's list; a mutation can only make one of the right entry.
                prop_assert!(!accepts(&*subject.verifier, &fields, &changed, time), "{}: {fields:?} {changed:?}", subject.name);
            }
        }
    }

    /// Whatever comes in, nothing panics and nothing is accepted.
    #[test]
    fn garbage_is_refused_without_panic(values in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..80), 2), body in proptest::collection::vec(any::<u8>(), 0..80)) {
        for subject in subjects() {
            let mut fields = (subject.sign)(1_614_265_330, b"{}");
            for (field, value) in fields.iter_mut().zip(&values) {
                field.1.clone_from(value);
            }
            prop_assert!(!accepts(&*subject.verifier, &fields, &body, 1_614_265_330));
        }
    }

    /// The reference signs the same and accepts the same.
    #[test]
    fn the_reference_implementation_agrees(
        key in proptest::collection::vec(any::<u8>(), 24..=64),
        id in "[A-Za-z0-9_-]{1,40}",
        body in any::<String>(),
        age in -400_i64..400,
        flip in proptest::option::of(0_usize..256),
    ) {
        // The reference reads the wall clock; half a second around the edges may go either way and is left out.
        prop_assume!(!(298..=302).contains(&age.abs()));
        let now = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs()).expect("fits");
        let time = now - age;
        let ours = SymmetricKey::from_bytes(&key).expect("a key");
        let reference = standardwebhooks::Webhook::from_bytes(key).expect("the reference takes the key");
        let signed = Signer::new([ours.clone().into()]).expect("a signer").sign(&id, UnixSeconds(time), body.as_bytes()).expect("signed");
        prop_assert_eq!(&signed.signature, &reference.sign(&id, time, body.as_bytes()).expect("the reference signs"));

        let mut signature = signed.signature.clone().into_bytes();
        if let Some(flip) = flip {
            let at = 3 + flip / 8 % (signature.len() - 3);
            signature[at] ^= 1 << (flip % 8);
        }
        // Only what can be a header value at all.
        let Ok(value) = http::HeaderValue::from_bytes(&signature) else { return Ok(()) };
        let mut map = http::HeaderMap::new();
        map.insert("webhook-id", id.parse().expect("a value"));
        map.insert("webhook-timestamp", time.to_string().parse().expect("a value"));
        map.insert("webhook-signature", value);
        let headers: Headers<'_> = map.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        let verifier = standard::Verifier::new([ours.into()]).expect("a verifier");
        let ours = verifier.verify(&Request::new(&headers, body.as_bytes()), UnixSeconds(now)).is_ok();
        prop_assert_eq!(ours, reference.verify(body.as_bytes(), &map).is_ok());
    }
}
