//! The list of bad input, item by item, for every scheme it applies to: what is accepted, and the
//! code of every refusal.
//!
//! AWS SNS, which is JSON and RSA, has its own list in `sns.rs`.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE};
use postbox_webhook::Scheme;

use crate::senders::{ID, Kit, Message, OTHER, SECRET, TIME, hex};

/// A body whose code contains a character that only one of the two base64 alphabets has.
fn telling(kit: Kit) -> (Vec<u8>, Vec<u8>) {
    let mut body = kit.body().to_vec();
    loop {
        let code = kit.code(&kit.key(SECRET), ID, &TIME.to_string(), &body);
        if STANDARD.encode(&code).contains(['+', '/']) && hex(&code) != hex(&code).to_uppercase() {
            return (body, code);
        }
        body.push(b'1');
    }
}

/// Runs one item for every scheme, and compares with the expected code.
fn each(item: &str, applies: impl Fn(Kit) -> bool, cases: impl Fn(Kit) -> Vec<(Message, i64, &'static str)>) {
    let mut seen = 0;
    for kit in Kit::ALL.into_iter().filter(|kit| applies(*kit)) {
        let cases = cases(kit);
        assert!(!cases.is_empty(), "{item} has no case for {kit:?}");
        for (message, now, expected) in cases {
            assert_eq!(message.verdict(&*kit.verifier(), now), expected, "{item}, {kit:?}: {message:?}");
            seen += 1;
        }
    }
    assert!(seen > 0, "{item} was not tried");
}

fn every(_: Kit) -> bool {
    true
}

#[test]
fn a_genuine_message_is_accepted() {
    each("genuine", every, |kit| {
        vec![
            (kit.genuine(SECRET, TIME, kit.body()), TIME, "ok"),
            (kit.genuine(SECRET, TIME, b""), TIME, "ok"),
            (kit.genuine(OTHER, TIME, kit.body()), TIME, "signature_mismatch"),
        ]
    });
}

#[test]
fn the_second_of_two_signatures_may_be_the_valid_one() {
    let time = TIME.to_string();
    each("second of two, in a list", Kit::has_list, |kit| {
        let sign = |secret| kit.signature(secret, ID, &time, kit.body());
        let message = |signatures: &[String]| kit.message(signatures, ID, &time, kit.body());
        vec![
            (message(&[sign(OTHER), sign(SECRET)]), TIME, "ok"),
            (message(&[sign(SECRET), sign(OTHER)]), TIME, "ok"),
            (message(&[sign(OTHER), sign(OTHER)]), TIME, "signature_mismatch"),
            (message(&[format!("{}nonsense", kit.prefix()), sign(SECRET)]), TIME, "ok"),
        ]
    });
    each("two headers", every, |kit| {
        let mut message = kit.genuine(SECRET, TIME, kit.body());
        let signature = message.fields.last().expect("the signature is last").clone();
        message.fields.push(signature);
        vec![(message, TIME, "signature_duplicate")]
    });
}

#[test]
fn an_old_key_is_accepted_in_its_overlap() {
    for kit in Kit::ALL {
        let receiver = kit.receiver(&[(OTHER, None), (SECRET, Some(TIME + 100))]);
        let old = kit.genuine(SECRET, TIME, kit.body());
        let new = kit.genuine(OTHER, TIME, kit.body());
        assert_eq!(old.verify(&*receiver, TIME + 100).map(|verified| verified.key), Ok(1), "{kit:?}");
        assert_eq!(new.verify(&*receiver, TIME + 101).map(|verified| verified.key), Ok(0), "{kit:?}");
        assert_eq!(old.verdict(&*receiver, TIME + 101), "key_retired", "{kit:?}");
        assert_eq!(old.verdict(&*kit.receiver(&[(OTHER, None)]), TIME), "signature_mismatch", "{kit:?}");
    }
}

#[test]
fn a_time_at_the_edge_of_the_tolerance_is_accepted() {
    each("edges", Kit::is_timed, |kit| {
        let message = || kit.genuine(SECRET, TIME, kit.body());
        let next = kit.signature(SECRET, ID, "1893456001", kit.body());
        vec![
            (message(), TIME + 300, "ok"),
            (message(), TIME - 300, "ok"),
            (message(), TIME + 301, "timestamp_too_old"),
            (message(), TIME - 301, "timestamp_too_new"),
            // A message that is not genuine is never reported as old or new.
            (kit.genuine(OTHER, TIME, kit.body()), TIME + 301, "signature_mismatch"),
            (kit.genuine(OTHER, TIME, kit.body()), 0, "signature_mismatch"),
            (kit.message(&[next], ID, &TIME.to_string(), kit.body()), TIME, "signature_mismatch"),
        ]
    });
    each("no time", |kit| !kit.is_timed(), |kit| vec![(kit.genuine(SECRET, TIME, kit.body()), i64::MAX, "ok")]);
}

#[test]
fn an_empty_signature_is_refused() {
    each("empty", every, |kit| {
        let mut blank = kit.with_code("", kit.body());
        blank.fields.last_mut().expect("the signature is last").1.clear();
        let mut missing = kit.with_code("", kit.body());
        missing.fields.pop();
        vec![
            (kit.with_code("", kit.body()), TIME, "signature_malformed"),
            (blank, TIME, "signature_malformed"),
            (missing, TIME, "signature_missing"),
        ]
    });
}

#[test]
fn a_part_of_the_right_code_is_refused() {
    each("prefix", every, |kit| {
        let code = kit.code(&kit.key(SECRET), ID, &TIME.to_string(), kit.body());
        let text = kit.encode(&code);
        let shorter = [1, 4, 8, text.len() / 2, text.len() - 2, text.len() - 1].map(|length| text[..length].to_owned());
        let bytes = [0, 1, 16, code.len() - 2, code.len() - 1].map(|length| kit.encode(&code[..length]));
        let longer =
            [format!("{text}0"), format!("{text}00"), format!("{text}{text}"), kit.encode(&[&code[..], &[0]].concat())];
        let all = shorter.into_iter().chain(bytes).chain(longer);
        all.map(|text| (kit.with_code(&text, kit.body()), TIME, "signature_malformed")).collect()
    });
}

#[test]
fn the_right_code_under_another_scheme_is_refused() {
    // These three sign the same bytes in the same way; only the header and the encoding differ.
    let alike = |kit| matches!(kit, Kit::GitHub | Kit::Shopify | Kit::Plain);
    for (kit, other) in Kit::ALL.into_iter().flat_map(|kit| Kit::ALL.map(|other| (kit, other))) {
        // Svix's headers are other names for the same scheme.
        if kit == other || kit.has_id() && other.has_id() && kit != Kit::StandardPublic && other != Kit::StandardPublic
        {
            continue;
        }
        let body = kit.body();
        let code = other.code(&other.key(SECRET), ID, &TIME.to_string(), body);
        let expected = match code.len() == kit.code(&kit.key(SECRET), ID, &TIME.to_string(), body).len() {
            _ if alike(kit) && alike(other) => "ok",
            true => "signature_mismatch",
            false => "signature_malformed",
        };
        let message = kit.with_code(&kit.encode(&code), body);
        assert_eq!(message.verdict(&*kit.verifier(), TIME), expected, "the code of {other:?} under {kit:?}");
        // A whole message of another scheme is never accepted; but one verifier accepts both kinds
        // of Twilio bodies.
        if kit.scheme() == Scheme::Twilio && other.scheme() == Scheme::Twilio {
            continue;
        }
        let message = other.genuine(SECRET, TIME, body);
        assert_ne!(message.verdict(&*kit.verifier(), TIME), "ok", "the message of {other:?} under {kit:?}");
    }
}

#[test]
fn the_right_code_under_another_version_is_refused() {
    each(
        "version",
        |kit| !kit.prefix().is_empty(),
        |kit| {
            let code = kit.encode(&kit.code(&kit.key(SECRET), ID, &TIME.to_string(), kit.body()));
            let under = |prefix: &str| kit.message(&[format!("{prefix}{code}")], ID, &TIME.to_string(), kit.body());
            let separator = kit.prefix().chars().last().expect("a separator");
            let near = if kit == Kit::Slack { "v1" } else { "v0" };
            [near, "v2", "v00", "V1", "sha1", "sha512", "none"]
                .map(|version| (under(&format!("{version}{separator}")), TIME, "signature_version_unsupported"))
                .to_vec()
        },
    );
}

#[test]
fn another_encoding_is_refused() {
    each("encoding", every, |kit| {
        let (body, code) = telling(kit);
        let wrong = match kit.is_hex() {
            true => vec![
                hex(&code).to_uppercase(),
                STANDARD.encode(&code),
                format!("0x{}", hex(&code)),
                hex(&code).replace('a', "A"),
            ],
            false => vec![
                hex(&code),
                URL_SAFE.encode(&code),
                STANDARD_NO_PAD.encode(&code),
                format!("{}=", STANDARD.encode(&code)),
            ],
        };
        let wrong = wrong.into_iter().filter(|text| *text != kit.encode(&code));
        let spaced = [" ", "\t"].map(|space| format!("{}{space}", kit.encode(&code)));
        wrong.chain(spaced).map(|text| (kit.with_code(&text, &body), TIME, "signature_malformed")).collect()
    });
}

#[test]
fn a_secret_derived_the_other_providers_way_is_refused() {
    each(
        "derivation",
        |kit| kit != Kit::StandardPublic,
        |kit| {
            let code = kit.code(&kit.key_of_another(SECRET), ID, &TIME.to_string(), kit.body());
            vec![(kit.with_code(&kit.encode(&code), kit.body()), TIME, "signature_mismatch")]
        },
    );
}

#[test]
fn a_time_that_is_not_plain_digits_is_refused_though_it_was_signed() {
    let times = [
        "",
        "+1893456000",
        "-1893456000",
        "-1",
        "- 1",
        " 1893456000",
        "1893456000 ",
        "1 893456000",
        "1893456000.0",
        "1.893456e9",
        "1893456e3",
        "1e9",
        "0x70dbd880",
        "01893456000",
        "00",
        "1_893_456_000",
        "1893456000Z",
        "1234567890123",
        "99999999999999999999",
        "18446744073709551616",
        "NaN",
        "2030-01-01T00:00:00Z",
    ];
    each("time", Kit::is_timed, |kit| {
        let message = |time: &str| kit.message(&[kit.signature(SECRET, ID, time, kit.body())], ID, time, kit.body());
        times.map(|time| (message(time), TIME, "timestamp_malformed")).to_vec()
    });
}

#[test]
fn an_id_with_a_dot_is_refused_though_it_was_signed() {
    let long = "x".repeat(256);
    each("id", Kit::has_id, |kit| {
        let time = TIME.to_string();
        let message = |id: &str| kit.message(&[kit.signature(SECRET, id, &time, kit.body())], id, &time, kit.body());
        ["a.b", ".", "msg_1.", ".msg_1", "", " ", "a b", &long].map(|id| (message(id), TIME, "id_malformed")).to_vec()
    });
}

#[test]
fn a_reserialised_body_is_refused() {
    each(
        "body",
        |kit| kit != Kit::TwilioForm,
        |kit| {
            let with_body = |body: &[u8]| Message { body: body.to_vec(), ..kit.genuine(SECRET, TIME, kit.body()) };
            [
                &br#"{"id":"evt_1","amount":10.0,"name":"Zo\u00eb"}"#[..],
                br#"{"amount": 10.0, "id": "evt_1", "name": "Zo\u00eb"}"#,
                br#"{"id": "evt_1", "amount": 10, "name": "Zo\u00eb"}"#,
                br#"{"id": "evt_1", "amount": 10.1, "name": "Zo\u00eb"}"#,
                br#"{"id": "evt_1", "amount": 10.0, "name": "Zo\u00EB"}"#,
                "{\"id\": \"evt_1\", \"amount\": 10.0, \"name\": \"Zoë\"}".as_bytes(),
                b"{\"id\": \"evt_1\", \"amount\": 10.0, \"name\": \"Zo\\u00eb\"}\n",
                b"\xef\xbb\xbf{\"id\": \"evt_1\", \"amount\": 10.0, \"name\": \"Zo\\u00eb\"}",
                b"",
            ]
            .map(|body| (with_body(body), TIME, "signature_mismatch"))
            .to_vec()
        },
    );
    // Twilio signs the parameters of a form, not its bytes: another spelling is the same message
    // with the same id.
    let kit = Kit::TwilioForm;
    let genuine = kit.genuine(SECRET, TIME, kit.body());
    let respelt = b"Digits=1234&Call%53id=CA1234567890ABCDE&From=14158675309".to_vec();
    let id = |message: &Message| message.verify(&*kit.verifier(), TIME).expect("genuine").message_id;
    assert_eq!(id(&genuine), id(&Message { body: respelt, ..genuine.clone() }));
    let changed = Message { body: b"Digits=1235&CallSid=CA1234567890ABCDE&From=14158675309".to_vec(), ..genuine };
    assert_eq!(changed.verdict(&*kit.verifier(), TIME), "signature_mismatch");
}

#[test]
fn two_timestamps_are_refused_equal_or_not() {
    each("two times", Kit::is_timed, |kit| {
        let genuine = kit.genuine(SECRET, TIME, kit.body());
        ["1893456000", "1893456001", ""]
            .map(|second| {
                let mut message = genuine.clone();
                match kit.time_header() {
                    Some(name) => message.fields.push((name, second.as_bytes().to_vec())),
                    None => message.fields[0].1.extend(format!(",t={second}").into_bytes()),
                }
                (message, TIME, "timestamp_duplicate")
            })
            .to_vec()
    });
    each(
        "no time",
        |kit| kit.time_header().is_some(),
        |kit| {
            let mut message = kit.genuine(SECRET, TIME, kit.body());
            message.fields.retain(|(name, _)| Some(*name) != kit.time_header());
            vec![(message, TIME, "timestamp_missing")]
        },
    );
    each("two ids", Kit::has_id, |kit| {
        let mut message = kit.genuine(SECRET, TIME, kit.body());
        let id = message.fields[0].clone();
        message.fields.push(id);
        vec![(message, TIME, "id_duplicate")]
    });
}
