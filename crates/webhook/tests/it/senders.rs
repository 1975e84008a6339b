//! The sender's side of every scheme, written with nothing but the hash functions, and the receiver
//! for it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::Signer as _;
use hmac::{Hmac, KeyInit, Mac};
use postbox_webhook::standard::SigningKey;
use postbox_webhook::{Headers, Refusal, Request, Scheme, Settings, UnixSeconds, Verified, Verify, plain};
use sha1::Sha1;
use sha2::{Digest, Sha256, Sha512};

/// 2030-01-01T00:00:00Z, when the certificates of the tests are valid.
pub(crate) const TIME: i64 = 1_893_456_000;
/// The id of every message that has one.
pub(crate) const ID: &str = "msg_1";
/// A text that every scheme accepts as a secret, each in its own way.
pub(crate) const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
/// Another one.
pub(crate) const OTHER: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

const TWILIO_URL: &str = "https://example.org/in/calls";

/// A received message.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Message {
    pub(crate) fields: Vec<(&'static str, Vec<u8>)>,
    pub(crate) query: Option<Vec<u8>>,
    pub(crate) body: Vec<u8>,
}

impl Message {
    pub(crate) fn verify(&self, verifier: &dyn Verify, now: i64) -> Result<Verified, Refusal> {
        let headers: Headers<'_> = self.fields.iter().map(|(name, value)| (*name, value.as_slice())).collect();
        // No HTTP library passes on a query that is not text.
        let query = self.query.as_deref().map(|query| std::str::from_utf8(query).unwrap_or("\u{0}"));
        let (request, now) = (Request { headers: &headers, query, body: &self.body }, UnixSeconds(now));
        let verified = verifier.verify(&request, now);
        // The check of the headers must agree with the whole: it passes whatever verifies, and
        // refuses for the same reason. The exception is the time, which the whole check looks at
        // last.
        if let Err(refusal) = verifier.check_head(&request, now) {
            assert!(
                verified.clone().is_err_and(|whole| whole == refusal || refusal.is_stale()),
                "{refusal:?} {self:?}"
            );
        }
        verified
    }

    /// `ok` or the refusal's code.
    pub(crate) fn verdict(&self, verifier: &dyn Verify, now: i64) -> &'static str {
        self.verify(verifier, now).map_or_else(Refusal::code, |_| "ok")
    }

    fn set(&mut self, name: &'static str, value: String) {
        self.fields.push((name, value.into_bytes()));
    }
}

/// A sender's way to sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kit {
    Standard,
    StandardPublic,
    Svix,
    Stripe,
    GitHub,
    Shopify,
    Slack,
    TwilioForm,
    TwilioJson,
    Plain,
    PlainTimed,
}

impl Kit {
    pub(crate) const ALL: [Self; 11] = [
        Self::Standard,
        Self::StandardPublic,
        Self::Svix,
        Self::Stripe,
        Self::GitHub,
        Self::Shopify,
        Self::Slack,
        Self::TwilioForm,
        Self::TwilioJson,
        Self::Plain,
        Self::PlainTimed,
    ];

    pub(crate) fn scheme(self) -> Scheme {
        match self {
            Self::Standard | Self::StandardPublic | Self::Svix => Scheme::StandardWebhooks,
            Self::Stripe => Scheme::Stripe,
            Self::GitHub => Scheme::GitHub,
            Self::Shopify => Scheme::Shopify,
            Self::Slack => Scheme::Slack,
            Self::TwilioForm | Self::TwilioJson => Scheme::Twilio,
            Self::Plain | Self::PlainTimed => Scheme::Hmac,
        }
    }

    /// Whether the time is signed.
    pub(crate) fn is_timed(self) -> bool {
        use Kit::*;
        matches!(self, Standard | StandardPublic | Svix | Stripe | Slack | PlainTimed)
    }

    /// Whether the id is signed.
    pub(crate) fn has_id(self) -> bool {
        matches!(self, Self::Standard | Self::StandardPublic | Self::Svix)
    }

    /// Whether one header holds a list of signatures.
    pub(crate) fn has_list(self) -> bool {
        self.has_id() || self == Self::Stripe
    }

    /// Whether codes are written in hex; otherwise in base64.
    pub(crate) fn is_hex(self) -> bool {
        matches!(self, Self::Stripe | Self::GitHub | Self::Slack | Self::Plain)
    }

    /// The text before the code.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            Self::Standard | Self::Svix => "v1,",
            Self::StandardPublic => "v1a,",
            Self::Stripe => "v1=",
            Self::GitHub => "sha256=",
            Self::Slack => "v0=",
            Self::PlainTimed => "h=",
            Self::Shopify | Self::TwilioForm | Self::TwilioJson | Self::Plain => "",
        }
    }

    /// A receiver of messages signed with any of `secrets`, which may have ends.
    pub(crate) fn receiver(self, secrets: &[(&str, Option<i64>)]) -> Box<dyn Verify> {
        let public = |secret: &str| match self {
            Self::StandardPublic => {
                let key = SigningKey::parse(&STANDARD.encode(seed_of(&decoded(secret)))).expect("a key");
                key.public_key().to_string()
            }
            _ => secret.to_owned(),
        };
        let texts: Vec<(String, _)> = secrets.iter().map(|(text, end)| (public(text), end.map(UnixSeconds))).collect();
        let secrets: Vec<(&str, _)> = texts.iter().map(|(text, end)| (text.as_str(), *end)).collect();
        let mut layout = plain::Layout::new("x-sig");
        if self == Self::PlainTimed {
            layout.prefix = self.prefix().into();
            layout.hash = plain::Hash::Sha512;
            layout.encoding = plain::Encoding::Base64;
            layout.timestamp_header = Some("x-time".into());
            layout.separator = ":".into();
        }
        let settings = Settings { public_url: Some(TWILIO_URL.into()), layout: Some(layout), ..Settings::default() };
        postbox_webhook::verifier_in_rotation(self.scheme(), &secrets, &settings).expect("a verifier")
    }

    /// The receiver of [`SECRET`].
    pub(crate) fn verifier(self) -> Box<dyn Verify> {
        self.receiver(&[(SECRET, None)])
    }

    /// The key's bytes, derived as by this provider.
    pub(crate) fn key(self, secret: &str) -> Vec<u8> {
        match self {
            Self::Standard | Self::StandardPublic | Self::Svix => decoded(secret),
            _ => secret.as_bytes().to_vec(),
        }
    }

    /// The key's bytes, derived as by another provider.
    pub(crate) fn key_of_another(self, secret: &str) -> Vec<u8> {
        if self.has_id() { secret.as_bytes().to_vec() } else { decoded(secret) }
    }

    /// The raw code over what this scheme signs.
    pub(crate) fn code(self, key: &[u8], id: &str, time: &str, body: &[u8]) -> Vec<u8> {
        match self {
            Self::Standard | Self::Svix => sha256_mac(key, &[id, ".", time, "."], body),
            Self::StandardPublic => {
                let message = [id.as_bytes(), b".", time.as_bytes(), b".", body].concat();
                ed25519_dalek::SigningKey::from_bytes(&seed_of(key)).sign(&message).to_bytes().to_vec()
            }
            Self::Stripe => sha256_mac(key, &[time, "."], body),
            Self::Slack => sha256_mac(key, &["v0:", time, ":"], body),
            Self::GitHub | Self::Shopify | Self::Plain => sha256_mac(key, &[], body),
            Self::PlainTimed => {
                let mut mac = Hmac::<Sha512>::new_from_slice(key).expect("any length");
                [time.as_bytes(), b":", body].iter().for_each(|part| mac.update(part));
                mac.finalize().into_bytes().to_vec()
            }
            Self::TwilioForm | Self::TwilioJson => {
                let mut mac = Hmac::<Sha1>::new_from_slice(key).expect("any length");
                mac.update(TWILIO_URL.as_bytes());
                mac.update(b"?");
                mac.update(self.query(body).as_deref().unwrap_or_default());
                if self == Self::TwilioForm {
                    // Forms in these tests are `name=value&…` in order, without escapes.
                    body.iter().filter(|byte| !b"=&".contains(byte)).for_each(|byte| mac.update(&[*byte]));
                }
                mac.finalize().into_bytes().to_vec()
            }
        }
    }

    fn query(self, body: &[u8]) -> Option<Vec<u8>> {
        match self {
            Self::TwilioForm => Some(b"foo=1&bar=2".to_vec()),
            Self::TwilioJson => Some(format!("foo=1&bodySHA256={}", hex(&Sha256::digest(body))).into_bytes()),
            _ => None,
        }
    }

    /// The code as this scheme encodes it, without the prefix.
    pub(crate) fn encode(self, code: &[u8]) -> String {
        if self.is_hex() { hex(code) } else { STANDARD.encode(code) }
    }

    /// A message with these signatures (prefixes included), at this time.
    pub(crate) fn message(self, signatures: &[String], id: &str, time: &str, body: &[u8]) -> Message {
        let mut message = Message { fields: Vec::new(), query: self.query(body), body: body.to_vec() };
        let names = match self {
            Self::Svix => ["svix-id", "svix-timestamp", "svix-signature"],
            Self::Slack => ["", "x-slack-request-timestamp", "x-slack-signature"],
            Self::GitHub => ["", "", "x-hub-signature-256"],
            Self::Shopify => ["", "", "x-shopify-hmac-sha256"],
            Self::TwilioForm | Self::TwilioJson => ["", "", "x-twilio-signature"],
            Self::Plain => ["", "", "x-sig"],
            Self::PlainTimed => ["", "x-time", "x-sig"],
            Self::Stripe => ["", "", "stripe-signature"],
            Self::Standard | Self::StandardPublic => ["webhook-id", "webhook-timestamp", "webhook-signature"],
        };
        if self.has_id() {
            message.set(names[0], id.to_owned());
        }
        if self.is_timed() && self != Self::Stripe {
            message.set(names[1], time.to_owned());
        }
        if self == Self::TwilioForm {
            message.set("content-type", "application/x-www-form-urlencoded".into());
        }
        match self {
            Self::Stripe => message.set(names[2], format!("t={time},{}", signatures.join(","))),
            _ if self.has_list() => message.set(names[2], signatures.join(" ")),
            _ => signatures.iter().for_each(|signature| message.set(names[2], signature.clone())),
        }
        message
    }

    /// The same with one encoded code.
    pub(crate) fn with_code(self, code: &str, body: &[u8]) -> Message {
        self.message(&[format!("{}{code}", self.prefix())], ID, &TIME.to_string(), body)
    }

    /// A signature, prefix included.
    pub(crate) fn signature(self, secret: &str, id: &str, time: &str, body: &[u8]) -> String {
        format!("{}{}", self.prefix(), self.encode(&self.code(&self.key(secret), id, time, body)))
    }

    /// A genuine message.
    pub(crate) fn genuine(self, secret: &str, time: i64, body: &[u8]) -> Message {
        let time = time.to_string();
        self.message(&[self.signature(secret, ID, &time, body)], ID, &time, body)
    }

    /// A body that this scheme's sender could send.
    pub(crate) fn body(self) -> &'static [u8] {
        match self {
            Self::TwilioForm => b"CallSid=CA1234567890ABCDE&Digits=1234&From=14158675309",
            _ => br#"{"id": "evt_1", "amount": 10.0, "name": "Zo\u00eb"}"#,
        }
    }

    /// The name of the header with the time, if the scheme has one.
    pub(crate) fn time_header(self) -> Option<&'static str> {
        let message = self.message(&[String::new()], ID, "", b"");
        message.fields.iter().map(|(name, _)| *name).find(|name| name.contains("time"))
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sha256_mac(key: &[u8], head: &[&str], body: &[u8]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("any length");
    head.iter().for_each(|part| mac.update(part.as_bytes()));
    mac.update(body);
    mac.finalize().into_bytes().to_vec()
}

fn decoded(secret: &str) -> Vec<u8> {
    STANDARD.decode(secret.strip_prefix("whsec_").expect("a prefix")).expect("base64")
}

/// An Ed25519 seed derived from a secret's bytes.
fn seed_of(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}
