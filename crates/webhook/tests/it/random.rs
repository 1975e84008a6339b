//! Random inputs: nothing panics, and the reference implementation of Standard Webhooks always
//! agrees.

use std::time::{SystemTime, UNIX_EPOCH};

use postbox_webhook::standard::{Signer, SymmetricKey};
use postbox_webhook::{Headers, Request, UnixSeconds, Verify, standard};
use proptest::prelude::*;

use crate::senders::{Kit, SECRET, TIME};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Whatever arrives, nothing panics and nothing is accepted.
    #[test]
    fn garbage_is_refused_without_panic(
        values in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..80), 4),
        body in proptest::collection::vec(any::<u8>(), 0..80),
    ) {
        for kit in Kit::ALL {
            let mut message = kit.genuine(SECRET, TIME, kit.body());
            for (field, value) in message.fields.iter_mut().zip(&values) {
                field.1.clone_from(value);
            }
            message.query = message.query.map(|_| values[3].clone());
            message.body.clone_from(&body);
            prop_assert!(message.verify(&*kit.verifier(), TIME).is_err());
        }
    }

    /// The reference signs and accepts the same.
    #[test]
    fn the_reference_implementation_agrees(
        key in proptest::collection::vec(any::<u8>(), 24..=64),
        id in "[A-Za-z0-9_-]{1,40}",
        body in any::<String>(),
        age in -400_i64..400,
        flip in proptest::option::of(0_usize..256),
    ) {
        // The reference reads the wall clock, so ages near the limits may go either way. They are
        // left out.
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
        // Only valid header values.
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
