//! A certificate of AWS, reduced to what verification needs: its URL, its key and its period.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::signature::{RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};
use x509_cert::der::asn1::{ObjectIdentifier, UintRef};
use x509_cert::der::{Decode, Reader, SliceReader};

use super::urls::CertificateUrl;
use crate::time::UnixSeconds;

/// `rsaEncryption`.
const RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");

/// Accepted bits of a modulus: strong enough, and small enough not to waste time.
const MODULUS_BITS: std::ops::RangeInclusive<usize> = 2_048..=8_192;

/// Longest PEM text; those of AWS have some 2 KiB.
const PEM_BYTES_MAX: usize = 16 * 1024;

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// A certificate fetched from its URL.
///
/// Cloning copies some 300 bytes. It can be kept for any time: its validity is checked at every
/// use.
#[derive(Clone)]
pub struct Certificate {
    url: CertificateUrl,
    /// An `RSAPublicKey` in DER.
    key: Vec<u8>,
    not_before: UnixSeconds,
    not_after: UnixSeconds,
}

impl Certificate {
    /// Parses what was fetched from `url`: exactly one PEM certificate, with an RSA key of at least
    /// 2048 bits.
    pub fn from_pem(url: &CertificateUrl, pem: &[u8]) -> Result<Self, CertificateError> {
        let der = unwrap_pem(pem).ok_or(CertificateError::Pem)?;
        let whole = x509_cert::Certificate::from_der(&der).map_err(|_| CertificateError::Certificate)?;
        let spki = &whole.tbs_certificate.subject_public_key_info;
        let key = spki.subject_public_key.as_bytes().filter(|_| spki.algorithm.oid == RSA);
        let key = key.filter(|key| is_strong(key)).ok_or(CertificateError::Key)?;
        let validity = whole.tbs_certificate.validity;
        let seconds = |time: x509_cert::time::Time| {
            i64::try_from(time.to_unix_duration().as_secs()).map(UnixSeconds).map_err(|_| CertificateError::Certificate)
        };
        Ok(Self {
            url: url.clone(),
            key: key.to_vec(),
            not_before: seconds(validity.not_before)?,
            not_after: seconds(validity.not_after)?,
        })
    }

    /// The URL it was fetched from.
    pub fn url(&self) -> &CertificateUrl {
        &self.url
    }

    /// The first and the last second at which it is valid. A cache may drop it afterwards.
    pub fn validity(&self) -> (UnixSeconds, UnixSeconds) {
        (self.not_before, self.not_after)
    }

    pub(super) fn is_valid_at(&self, now: UnixSeconds) -> bool {
        (self.not_before..=self.not_after).contains(&now)
    }

    /// Whether its key made this RSA-SHA256 signature of `text`.
    pub(super) fn signed(&self, text: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, &self.key).verify(text, signature).is_ok()
    }
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Certificate({}, valid from {} to {})", self.url, self.not_before.0, self.not_after.0)
    }
}

/// What was fetched is not a certificate that can verify messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CertificateError {
    /// Not exactly one PEM block of a certificate, or too large.
    #[error("what was fetched is not a PEM certificate: a proxy's error page?")]
    Pem,
    /// The block is not an X.509 certificate.
    #[error("what was fetched is not an X.509 certificate")]
    Certificate,
    /// The key is not RSA, or of an unusual size.
    #[error("the certificate's key is not RSA of 2048 to 8192 bits")]
    Key,
}

/// Decodes the only block, which may be surrounded by white space only.
fn unwrap_pem(pem: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(pem).ok().filter(|text| text.len() <= PEM_BYTES_MAX)?;
    let inner = text.trim_ascii().strip_prefix(BEGIN)?.strip_suffix(END)?;
    let base64: String = inner.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    STANDARD.decode(base64).ok()
}

/// Whether this is the modulus and exponent of a key of an accepted size. The exponent is checked
/// when the key is used.
fn is_strong(key: &[u8]) -> bool {
    let modulus_bits = || -> x509_cert::der::Result<usize> {
        let mut reader = SliceReader::new(key)?;
        let bits = reader.sequence(|inner| {
            let modulus = UintRef::decode(inner)?;
            let _exponent = UintRef::decode(inner)?;
            let leading = modulus.as_bytes().first().map_or(0, |byte| byte.leading_zeros() as usize);
            Ok(modulus.as_bytes().len() * 8 - leading)
        })?;
        reader.finish(bits)
    };
    modulus_bits().is_ok_and(|bits| MODULUS_BITS.contains(&bits))
}
