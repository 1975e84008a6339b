//! Message authentication codes: computing, decoding to an exact length, comparing in constant
//! time.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac as _};
use sha1::Sha1;
use sha2::{Digest, Sha256, Sha512};
use subtle::ConstantTimeEq;

use crate::secret::SecretBytes;

#[cfg(test)]
mod equal_time;

const ANY_LENGTH: &str = "HMAC takes keys of any length";

/// A computed code. It has no `==`; it is compared with [`Mac::is`].
pub(crate) struct Mac<const N: usize>([u8; N]);

impl<const N: usize> Mac<N> {
    /// Whether the sender computed the same code; compared in constant time.
    pub(crate) fn is(&self, theirs: &[u8; N]) -> bool {
        same(&self.0, theirs)
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

/// Compares in constant time. Both sides have the same length by type, so a shorter text cannot
/// match.
///
/// Generic over the element, so that a test can count the comparisons.
pub(crate) fn same<T: ConstantTimeEq, const N: usize>(ours: &[T; N], theirs: &[T; N]) -> bool {
    ours.as_slice().ct_eq(theirs.as_slice()).into()
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

    fn key(bytes: &[u8]) -> SecretBytes {
        SecretBytes::unchecked(bytes)
    }

    const JEFE: &[u8] = b"what do ya want for nothing?";
    const LONG_KEY_TEXT: &[u8] = b"Test Using Larger Than Block-Size Key - Hash Key First";

    #[test]
    fn rfc_4231_cases_of_sha_256() {
        let counting: Vec<u8> = (1..=25).collect();
        let long = b"This is a test using a larger than block-size key and a larger than block-size data. The key needs to be hashed before being used by the HMAC algorithm.";
        for (secret, data, expected) in [
            (&[0x0b; 20][..], &b"Hi There"[..], "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
            (b"Jefe", JEFE, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
            (&[0xaa; 20], &[0xdd; 50], "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
            (&counting, &[0xcd; 50], "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"),
            // The RFC prints only a truncated code. This is the full one.
            (&[0x0c; 20], b"Test With Truncation", "a3b6167473100ee06e0c796c2955552bfa6f7c0a6a8aef8b93f860aab0cd20c5"),
            (&[0xaa; 131], LONG_KEY_TEXT, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"),
            (&[0xaa; 131], long, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"),
        ] {
            assert_eq!(to_hex(hmac_sha256(&key(secret), &[data]).bytes()), expected);
        }
    }

    #[test]
    fn rfc_4231_cases_of_sha_512() {
        let counting: Vec<u8> = (1..=25).collect();
        for (secret, data, expected) in [
            (
                &[0x0b; 20][..],
                &b"Hi There"[..],
                "87aa7cdea5ef619d4ff0b4241a1d6cb02379f4e2ce4ec2787ad0b30545e17cdedaa833b7d6b8a702038b274eaea3f4e4be9d914eeb61f1702e696c203a126854",
            ),
            (
                b"Jefe",
                JEFE,
                "164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea2505549758bf75c05a994a6d034f65f8f0e6fdcaeab1a34d4a6b4b636e070a38bce737",
            ),
            (
                &[0xaa; 20],
                &[0xdd; 50],
                "fa73b0089d56a284efb0f0756c890be9b1b5dbdd8ee81a3655f83e33b2279d39bf3e848279a722c806b485a47e67c807b946a337bee8942674278859e13292fb",
            ),
            (
                &counting,
                &[0xcd; 50],
                "b0ba465637458c6990e5a8c5f61d4af7e576d97ff94b872de76f8050361ee3dba91ca5c11aa25eb4d679275cc5788063a5f19741120c4f2de2adebeb10a298dd",
            ),
            (
                &[0xaa; 131],
                LONG_KEY_TEXT,
                "80b24263c7c1a3ebb71493c1dd7be8b49b46d1f41b4aeec1121b013783f8f3526b56d037e05f2598bd0fd2215d6a1e5295e64f73f63f0aec8b915a985d786598",
            ),
        ] {
            // In two parts, which are the same message.
            let (head, tail) = data.split_at(data.len() / 2);
            assert_eq!(to_hex(hmac_sha512(&key(secret), &[head, tail]).bytes()), expected);
        }
    }

    #[test]
    fn rfc_2202_cases_of_sha_1() {
        let counting: Vec<u8> = (1..=25).collect();
        for (secret, data, expected) in [
            (&[0x0b; 20][..], &b"Hi There"[..], "b617318655057264e28bc0b6fb378c8ef146be00"),
            (b"Jefe", JEFE, "effcdf6ae5eb2fa2d27416d5f184df9c259a7c79"),
            (&[0xaa; 20], &[0xdd; 50], "125d7342b9ac11cd91a39af48aa17b4f63f175d3"),
            (&counting, &[0xcd; 50], "4c9007f4026250c6bc8414f9bf50c86c2d7235da"),
            (&[0xaa; 80], LONG_KEY_TEXT, "aa4ae5e15272d00e95705637ce8a3b55ed402112"),
        ] {
            assert_eq!(to_hex(hmac_sha1(&key(secret), &[data]).bytes()), expected);
        }
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
