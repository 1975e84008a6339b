//! Random cases from an independent implementation (`fixtures/differential.py`, Python's standard
//! library), with its verdict on each. Ours must always be the same.
//!
//! `POSTBOX_TEST_DIFFERENTIAL=1000000 POSTBOX_SEED=1 cargo test --release -p postbox-webhook --test it -- --nocapture differential`
//! is the long version. A missing Python is a failure: a check that is skipped proves nothing.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use postbox_webhook::sns::{Certificate, CertificateUrl, TopicArn};
use postbox_webhook::{Headers, Request, Scheme, Settings, UnixSeconds, plain, sns, verifier_in_rotation};
use serde::Deserialize;

use crate::mutations::{number, seed};

/// Cases in an ordinary run, which takes a few seconds.
const CASES: u64 = 20_000;

#[derive(Debug, Deserialize)]
struct Case {
    scheme: String,
    secrets: Vec<(String, Option<i64>)>,
    headers: Vec<(String, String)>,
    query: Option<String>,
    url: Option<String>,
    now: i64,
    body: String,
    accept: bool,
}

/// Header bytes are encoded as the characters with the same numbers.
fn bytes(text: &str) -> Vec<u8> {
    text.chars().map(|character| u8::try_from(u32::from(character)).expect("one byte")).collect()
}

impl Case {
    /// Our verdict: `ok` or the refusal's code.
    fn verdict(&self, sns: &(sns::Verifier, Certificate)) -> &'static str {
        let now = UnixSeconds(self.now);
        let body = STANDARD.decode(&self.body).expect("base64");
        if self.scheme == "sns" {
            let verified = sns.0.read(&body).and_then(|unverified| unverified.verify(&sns.1, now));
            return verified.map_or_else(|refusal| refusal.code(), |_| "ok");
        }
        let secrets: Vec<_> = self.secrets.iter().map(|(text, end)| (text.as_str(), end.map(UnixSeconds))).collect();
        let mut layout = plain::Layout::new("x-sig");
        let scheme = match self.scheme.as_str() {
            "v1a" => Scheme::StandardWebhooks,
            "hmac-timed" => {
                layout.prefix = "h=".into();
                layout.hash = plain::Hash::Sha512;
                layout.encoding = plain::Encoding::Base64;
                layout.timestamp_header = Some("x-time".into());
                layout.separator = ":".into();
                Scheme::Hmac
            }
            other => other.parse().expect("a scheme"),
        };
        let settings = Settings { public_url: self.url.clone(), layout: Some(layout), ..Settings::default() };
        let verifier = verifier_in_rotation(scheme, &secrets, &settings).expect("a verifier");
        let values: Vec<(&str, Vec<u8>)> =
            self.headers.iter().map(|(name, value)| (name.as_str(), bytes(value))).collect();
        let headers: Headers<'_> = values.iter().map(|(name, value)| (*name, value.as_slice())).collect();
        let request = Request { headers: &headers, query: self.query.as_deref(), body: &body };
        verifier.verify(&request, now).map_or_else(|refusal| refusal.code(), |_| "ok")
    }
}

fn sns_side() -> (sns::Verifier, Certificate) {
    let url = "https://sns.eu-central-1.amazonaws.com/SimpleNotificationService-0123456789abcdef0123456789abcdef.pem";
    let url = CertificateUrl::parse(url).expect("a URL");
    let certificate = Certificate::from_pem(&url, include_bytes!("../fixtures/sns/signing.pem"));
    let topic = TopicArn::parse("arn:aws:sns:eu-central-1:123456789012:orders").expect("a topic");
    (sns::Verifier::new([topic]).expect("a verifier"), certificate.expect("a certificate"))
}

#[test]
fn an_independent_implementation_always_agrees() {
    let (seed, count) = (seed(), number("POSTBOX_TEST_DIFFERENTIAL").unwrap_or(CASES));
    println!("replay with POSTBOX_SEED={seed} POSTBOX_TEST_DIFFERENTIAL={count}");
    let start = Instant::now();
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/differential.py");
    let mut command = Command::new("python3");
    command.arg(program).args([count.to_string(), seed.to_string()]).stdout(Stdio::piped());
    let mut python = command.spawn().expect("python3 (3.9 or newer) must be installed: it is the other implementation");
    let lines = BufReader::new(python.stdout.take().expect("piped")).lines();
    let sns = sns_side();
    let mut tally: BTreeMap<String, [u64; 2]> = BTreeMap::new();
    for line in lines {
        let line = line.expect("text");
        let case: Case = serde_json::from_str(&line).expect("a case");
        let ours = case.verdict(&sns);
        assert_eq!(
            ours == "ok",
            case.accept,
            "we say {ours}; POSTBOX_SEED={seed} POSTBOX_TEST_DIFFERENTIAL={count}: {line}"
        );
        tally.entry(case.scheme).or_default()[usize::from(case.accept)] += 1;
    }
    assert!(python.wait().expect("it ends").success(), "the other implementation failed");
    println!("{count} cases in {:?}, no difference; refused and accepted: {tally:?}", start.elapsed());
    assert_eq!(tally.values().flatten().sum::<u64>(), count);
    // Agreement means something only if every kind of case occurred.
    if count >= CASES {
        assert_eq!(tally.len(), 10);
        assert!(tally.values().flatten().all(|cases| *cases > count / 100), "{tally:?}");
    }
}
