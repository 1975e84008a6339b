//! Plain HMAC, for senders with a scheme of their own: which header, which hash, which spelling, and whether a time is signed.
//!
//! Without a signed time a captured message can be replayed for ever; deduplicate by a digest of the body.

use crate::error::{Part, Refusal, SecretError, SignError};
use crate::mac::{from_base64, from_hex, hmac_sha256, hmac_sha512, same, to_base64, to_hex};
use crate::request::{Request, Scheme, Verified, Verify};
use crate::secret::{Keys, text_secret};
use crate::time::{Tolerance, UnixSeconds};

text_secret! {
    /// The shared secret.
    "hmac"
}

/// The hash under the MAC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Hash {
    /// HMAC-SHA256.
    #[default]
    Sha256,
    /// HMAC-SHA512.
    Sha512,
}

/// How the MAC is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Encoding {
    /// Lower-case hex.
    #[default]
    Hex,
    /// Padded base64.
    Base64,
}

/// What the sender does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The header with the signature.
    pub signature_header: String,
    /// What stands before the MAC in it, e.g. `sha256=`.
    pub prefix: String,
    /// The hash.
    pub hash: Hash,
    /// The spelling.
    pub encoding: Encoding,
    /// A header with seconds since 1970 that are signed too, as `timestamp` + `separator` + `body`.
    pub timestamp_header: Option<String>,
    /// What stands between timestamp and body. It must not be empty or begin with a digit, else two messages share a signature.
    pub separator: String,
}

impl Layout {
    /// HMAC-SHA256 over the body, in lower-case hex, in `signature_header`.
    pub fn new(signature_header: impl Into<String>) -> Self {
        Self {
            signature_header: signature_header.into(),
            prefix: String::new(),
            hash: Hash::default(),
            encoding: Encoding::default(),
            timestamp_header: None,
            separator: ".".into(),
        }
    }

    fn check(&self) -> Result<(), SecretError> {
        if self.signature_header.is_empty() || self.timestamp_header.as_deref() == Some("") {
            return Err(SecretError::Setting("a header name is empty"));
        }
        let ambiguous = self.separator.is_empty() || self.separator.starts_with(|c: char| c.is_ascii_digit());
        if self.timestamp_header.is_some() && ambiguous {
            return Err(SecretError::Setting("the separator must not be empty or begin with a digit"));
        }
        Ok(())
    }

    /// The MAC as it stands in the header, prefix included.
    fn seal(&self, key: &Secret, timestamp: Option<&str>, body: &[u8]) -> String {
        let parts = self.parts(timestamp, body);
        let encode = |mac: &[u8]| match self.encoding {
            Encoding::Hex => to_hex(mac),
            Encoding::Base64 => to_base64(mac),
        };
        let mac = match self.hash {
            Hash::Sha256 => encode(&hmac_sha256(&key.0, &parts)),
            Hash::Sha512 => encode(&hmac_sha512(&key.0, &parts)),
        };
        format!("{}{mac}", self.prefix)
    }

    fn parts<'a>(&'a self, timestamp: Option<&'a str>, body: &'a [u8]) -> [&'a [u8]; 3] {
        match timestamp {
            Some(timestamp) => [timestamp.as_bytes(), self.separator.as_bytes(), body],
            None => [b"", b"", body],
        }
    }

    fn decode<const N: usize>(&self, text: &str) -> Result<[u8; N], Refusal> {
        let bytes = match self.encoding {
            Encoding::Hex => from_hex(text),
            Encoding::Base64 => from_base64(text),
        };
        bytes.ok_or(Refusal::Malformed(Part::Signature))
    }
}

/// Signs in a layout of your own.
#[derive(Debug, Clone)]
pub struct Signer {
    key: Secret,
    layout: Layout,
}

impl Signer {
    /// A signer.
    pub fn new(key: Secret, layout: Layout) -> Result<Self, SecretError> {
        layout.check()?;
        Ok(Self { key, layout })
    }

    /// The headers to send with `body`: the signature's, and the timestamp's if the layout has one.
    pub fn sign(&self, now: UnixSeconds, body: &[u8]) -> Result<Vec<(String, String)>, SignError> {
        let Some(timestamp_header) = &self.layout.timestamp_header else {
            return Ok(vec![(self.layout.signature_header.clone(), self.layout.seal(&self.key, None, body))]);
        };
        let timestamp = now.0.to_string();
        UnixSeconds::parse(&timestamp).map_err(|_| SignError::Timestamp)?;
        let signature = self.layout.seal(&self.key, Some(&timestamp), body);
        Ok(vec![(self.layout.signature_header.clone(), signature), (timestamp_header.clone(), timestamp)])
    }
}

/// Verifies a layout of your own.
#[derive(Debug, Clone)]
pub struct Verifier {
    keys: Keys<Secret>,
    layout: Layout,
    tolerance: Tolerance,
}

impl Verifier {
    /// A verifier that accepts any of `keys`.
    pub fn new(keys: impl IntoIterator<Item = Secret>, layout: Layout) -> Result<Self, SecretError> {
        layout.check()?;
        Ok(Self { keys: Keys::new(keys)?, layout, tolerance: Tolerance::default() })
    }

    /// Sets how far the signed time may be off, where the layout has one.
    #[must_use]
    pub fn tolerance(mut self, tolerance: Tolerance) -> Self {
        self.tolerance = tolerance;
        self
    }
}

impl Verify for Verifier {
    fn scheme(&self) -> Scheme {
        Scheme::Hmac
    }

    fn verify(&self, request: &Request<'_>, now: UnixSeconds) -> Result<Verified, Refusal> {
        let layout = &self.layout;
        let timestamp = match &layout.timestamp_header {
            Some(name) => Some(request.headers.only(Part::Timestamp, name)?),
            None => None,
        };
        let signed_at = timestamp.map(UnixSeconds::parse).transpose()?;
        let header = request.headers.only(Part::Signature, &layout.signature_header)?;
        let text = header.strip_prefix(layout.prefix.as_str()).ok_or(Refusal::VersionUnsupported)?;
        let parts = layout.parts(timestamp, request.body);
        let key = match layout.hash {
            Hash::Sha256 => {
                let signature = layout.decode(text)?;
                self.keys.position(|key| same(&hmac_sha256(&key.0, &parts), &signature))
            }
            Hash::Sha512 => {
                let signature = layout.decode(text)?;
                self.keys.position(|key| same(&hmac_sha512(&key.0, &parts), &signature))
            }
        };
        let key = key.ok_or(Refusal::Mismatch)?;
        if let Some(signed_at) = signed_at {
            self.tolerance.check(signed_at, now)?;
        }
        Ok(Verified { message_id: None, signed_at, key })
    }
}
