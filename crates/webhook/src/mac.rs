//! Message authentication codes: computing, decoding to an exact length, comparing in constant time.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha1::Sha1;
use sha2::{Digest, Sha256, Sha512};
use subtle::ConstantTimeEq;

use crate::secret::SecretBytes;

const ANY_LENGTH: &str = "HMAC takes keys of any length";

/// HMAC-SHA256 over the parts glued together.
pub(crate) fn hmac_sha256(key: &SecretBytes, parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key.expose()).expect(ANY_LENGTH);
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

/// HMAC-SHA512 over the parts glued together.
pub(crate) fn hmac_sha512(key: &SecretBytes, parts: &[&[u8]]) -> [u8; 64] {
    let mut mac = Hmac::<Sha512>::new_from_slice(key.expose()).expect(ANY_LENGTH);
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

/// HMAC-SHA1, for Twilio only (as a MAC, SHA-1 is not broken).
pub(crate) fn hmac_sha1(key: &SecretBytes, parts: &[&[u8]]) -> [u8; 20] {
    let mut mac = Hmac::<Sha1>::new_from_slice(key.expose()).expect(ANY_LENGTH);
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

/// SHA-256 over the parts glued together.
pub(crate) fn sha256(parts: &[&[u8]]) -> [u8; 32] {
    let mut digest = Sha256::new();
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize().into()
}

/// Equality in constant time. Both sides have the same length by type, so there is no shorter match.
pub(crate) fn same<const N: usize>(ours: &[u8; N], theirs: &[u8; N]) -> bool {
    ours.ct_eq(theirs).into()
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

/// Lower-case hex.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

/// Decodes padded, canonical base64 of exactly `N` bytes.
pub(crate) fn from_base64<const N: usize>(text: &str) -> Option<[u8; N]> {
    // The length is checked first so that a huge header is not decoded at all.
    (text.len() == N.div_ceil(3) * 4).then(|| STANDARD.decode(text).ok())??.try_into().ok()
}

/// Padded base64.
pub(crate) fn to_base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(bytes: &[u8]) -> SecretBytes {
        SecretBytes::unchecked(bytes)
    }

    #[test]
    fn rfc_4231_cases() {
        for (secret, data, expected) in [
            (&[0x0b; 20][..], &b"Hi There"[..], "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
            (
                b"Jefe",
                b"what do ya want for nothing?",
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
            ),
            (&[0xaa; 20], &[0xdd; 50], "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
            (
                &[0xaa; 131],
                b"Test Using Larger Than Block-Size Key - Hash Key First",
                "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
            ),
        ] {
            assert_eq!(to_hex(&hmac_sha256(&key(secret), &[data])), expected);
        }
        assert_eq!(
            to_hex(&hmac_sha512(&key(b"Jefe"), &[b"what do ya want ", b"for nothing?"])),
            "164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea2505549758bf75c05a994a6d034f65f8f0e6fdcaeab1a34d4a6b4b636e070a38bce737"
        );
    }

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
