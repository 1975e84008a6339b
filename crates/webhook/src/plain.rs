//! Plain HMAC, for senders with their own scheme: which header, which hash, which encoding, and
//! whether a time is signed.
//!
//! Without a signed time a captured message can be replayed for ever. Deduplicate by a digest of
//! the body.

use crate::error::{Part, Refusal, SecretError, SignError};
use crate::keyed::{self, Key, Live, Timed};
use crate::mac::{from_base64, from_hex, hmac_sha256, hmac_sha512, to_base64, to_hex};
use crate::request::{Request, Scheme};
use crate::secret::text_secret;
use crate::time::UnixSeconds;

text_secret! {
    /// The shared secret.
    "hmac"
}

/// The hash of the MAC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Hash {
    /// HMAC-SHA256.
    #[default]
    Sha256,
    /// HMAC-SHA512.
    Sha512,
}

/// How the MAC is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Encoding {
    /// Lower-case hex.
    #[default]
    Hex,
    /// Padded base64.
    Base64,
}

/// The sender's scheme.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The header with the signature.
    pub signature_header: String,
    /// The text before the MAC, e.g. `sha256=`.
    pub prefix: String,
    /// The hash.
    pub hash: Hash,
    /// The encoding.
    pub encoding: Encoding,
    /// A header with seconds since 1970 that are signed as well, as `timestamp` + `separator` +
    /// `body`.
    pub timestamp_header: Option<String>,
    /// The text between timestamp and body. It must not be empty or begin with a digit, otherwise
    /// two messages could share a signature.
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

    pub(crate) fn checked(self) -> Result<Self, SecretError> {
        if self.signature_header.is_empty() || self.timestamp_header.as_deref() == Some("") {
            return Err(SecretError::Setting("a header name is empty"));
        }
        let twice = |name: &String| name.eq_ignore_ascii_case(&self.signature_header);
        if self.timestamp_header.as_ref().is_some_and(twice) {
            return Err(SecretError::Setting("one header cannot hold both the signature and the time"));
        }
        let ambiguous = self.separator.is_empty() || self.separator.starts_with(|c: char| c.is_ascii_digit());
        if self.timestamp_header.is_some() && ambiguous {
            return Err(SecretError::Setting("the separator must not be empty or begin with a digit"));
        }
        Ok(self)
    }

    /// Returns the MAC as written in the header, with its prefix.
    fn seal(&self, key: &Secret, timestamp: Option<&str>, body: &[u8]) -> String {
        let parts = self.parts(timestamp, body);
        let encode = |mac: &[u8]| match self.encoding {
            Encoding::Hex => to_hex(mac),
            Encoding::Base64 => to_base64(mac),
        };
        let mac = match self.hash {
            Hash::Sha256 => encode(hmac_sha256(&key.0, &parts).bytes()),
            Hash::Sha512 => encode(hmac_sha512(&key.0, &parts).bytes()),
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

/// Signs with a layout of your own.
#[derive(Debug, Clone)]
pub struct Signer {
    key: Secret,
    layout: Layout,
}

impl Signer {
    /// Creates a signer.
    pub fn new(key: Secret, layout: Layout) -> Result<Self, SecretError> {
        Ok(Self { key, layout: layout.checked()? })
    }

    /// Returns the headers to send with `body`: the signature, and the timestamp if the layout has
    /// one.
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
pub type Verifier = keyed::Verifier<Secret>;

impl Verifier {
    /// Creates a verifier that accepts any of `keys`.
    pub fn new(keys: impl IntoIterator<Item = Secret>, layout: Layout) -> Result<Self, SecretError> {
        Self::with(keys.into_iter().map(Live::always), layout.checked()?)
    }
}

/// The claims in the headers.
#[doc(hidden)]
pub struct Claim<'r> {
    layout: &'r Layout,
    timestamp: Option<&'r str>,
    signed_at: Option<UnixSeconds>,
    signature: Signature,
}

/// A decoded MAC.
enum Signature {
    Sha256([u8; 32]),
    Sha512([u8; 64]),
}

impl Timed for Secret {}

impl Key for Secret {
    const SCHEME: Scheme = Scheme::Hmac;
    type Settings = Layout;
    type Claim<'r> = Claim<'r>;

    fn chosen_headers(layout: &Layout) -> Vec<&str> {
        [Some(layout.signature_header.as_str()), Self::chosen_time_header(layout)].into_iter().flatten().collect()
    }

    fn chosen_time_header(layout: &Layout) -> Option<&str> {
        layout.timestamp_header.as_deref()
    }

    fn read<'r>(layout: &'r Layout, request: &Request<'r>) -> Result<Claim<'r>, Refusal> {
        let timestamp = match &layout.timestamp_header {
            Some(name) => Some(request.headers.only(Part::Timestamp, name)?),
            None => None,
        };
        let signed_at = timestamp.map(UnixSeconds::parse).transpose()?;
        let header = request.headers.only(Part::Signature, &layout.signature_header)?;
        let text = header.strip_prefix(layout.prefix.as_str()).ok_or(Refusal::VersionUnsupported)?;
        let signature = match layout.hash {
            Hash::Sha256 => Signature::Sha256(layout.decode(text)?),
            Hash::Sha512 => Signature::Sha512(layout.decode(text)?),
        };
        Ok(Claim { layout, timestamp, signed_at, signature })
    }

    fn signed(&self, claim: &Claim<'_>, body: &[u8]) -> bool {
        let parts = claim.layout.parts(claim.timestamp, body);
        match &claim.signature {
            Signature::Sha256(signature) => hmac_sha256(&self.0, &parts).is(signature),
            Signature::Sha512(signature) => hmac_sha512(&self.0, &parts).is(signature),
        }
    }

    fn signed_at(claim: &Claim<'_>) -> Option<UnixSeconds> {
        claim.signed_at
    }
}
