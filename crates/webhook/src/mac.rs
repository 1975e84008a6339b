//! Message authentication codes: computing, decoding to an exact length, comparing in constant
//! time.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac as _};
use sha1::Sha1;
use sha2::{Digest, Sha256, Sha512};
use subtle::ConstantTimeEq;

use crate::secret::SecretBytes;

const ANY_LENGTH: &str = "HMAC takes keys of any length";

/// A computed code. It has no `==`; it is compared with [`Mac::is`].
pub(crate) struct Mac<const N: usize>([u8; N]);

impl<const N: usize> Mac<N> {
    /// Whether the sender computed the same code; compared in constant time. Both have the same
    /// length by type, so a shorter text cannot match.
    pub(crate) fn is(&self, theirs: &[u8; N]) -> bool {
        self.0.as_slice().ct_eq(theirs).into()
    }

    /// The code's bytes, for a signer.
    pub(crate) fn bytes(&self) -> &[u8; N] {
        &self.0
    }
}

/// HMAC-SHA256 over the concatenated parts.
pub(crate) fn hmac_sha256(key: &SecretBytes, parts: &[&[u8]]) -> Mac<32> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key.expose()).expect(ANY_LENGTH);
    parts.iter().for_each(|part| mac.update(part));
    Mac(mac.finalize().into_bytes().into())
}

/// HMAC-SHA512 over the concatenated parts.
pub(crate) fn hmac_sha512(key: &SecretBytes, parts: &[&[u8]]) -> Mac<64> {
    let mut mac = Hmac::<Sha512>::new_from_slice(key.expose()).expect(ANY_LENGTH);
    parts.iter().for_each(|part| mac.update(part));
    Mac(mac.finalize().into_bytes().into())
}

/// HMAC-SHA1, for Twilio only (as a MAC, SHA-1 is not broken).
pub(crate) fn hmac_sha1(key: &SecretBytes, parts: &[&[u8]]) -> Mac<20> {
    let mut mac = Hmac::<Sha1>::new_from_slice(key.expose()).expect(ANY_LENGTH);
    parts.iter().for_each(|part| mac.update(part));
    Mac(mac.finalize().into_bytes().into())
}

/// SHA-256 over the concatenated parts.
pub(crate) fn sha256(parts: &[&[u8]]) -> [u8; 32] {
    let mut digest = Sha256::new();
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize().into()
}

/// Decodes lower-case hex of exactly `N` bytes.
pub(crate) fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != N * 2 {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
    }
    Some(bytes)
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

/// Encodes as lower-case hex.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

/// Decodes padded, canonical base64 of exactly `N` bytes.
pub(crate) fn from_base64<const N: usize>(text: &str) -> Option<[u8; N]> {
    // The length is checked first, so that a huge header is not decoded at all.
    (text.len() == N.div_ceil(3) * 4).then(|| STANDARD.decode(text).ok())??.try_into().ok()
}

/// Encodes as padded base64.
pub(crate) fn to_base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_spelling_decodes() {
        assert_eq!(from_hex::<2>("0aff"), Some([10, 255]));
        for wrong in ["", "0a", "0afff", "0AFF", "0afg", "0a f", "+aff", "0aff00"] {
            assert_eq!(from_hex::<2>(wrong), None, "{wrong}");
        }
        assert_eq!(from_base64::<1>("AA=="), Some([0]));
        for wrong in ["", "AA", "AA=", "AB==", "AAA=", "AA==AA==", " AA=", "AAAA", "_w=="] {
            assert_eq!(from_base64::<1>(wrong), None, "{wrong}");
        }
        assert_eq!(from_hex::<20>(&to_hex(&[7; 20])), Some([7; 20]));
        assert_eq!(from_base64::<64>(&to_base64(&[7; 64])), Some([7; 64]));
    }
}
