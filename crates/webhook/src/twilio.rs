//! Twilio: `X-Twilio-Signature`, HMAC-SHA1 in base64 over the public URL and, for forms, the
//! parameters.
//!
//! - The URL is the one that Twilio calls. Its scheme, host, port and path come from your
//!   configuration, never from `Host` or `X-Forwarded-*`, which anybody can write. Only the query
//!   is taken from the request, because the signature covers it.
//! - Forms: names and values are concatenated, sorted by name; several values of one name are
//!   sorted, and duplicates count once. Like Twilio's own libraries, the URL is tried as
//!   configured, and with and without its port.
//! - JSON: the query contains `bodySHA256`, and the body must have that hash. Any other body is
//!   refused, because nothing signs it.
//! - No time is signed. The message id is a digest of the signed text, because one form can be
//!   written in several ways with the same signature.

use std::borrow::Cow;

use crate::error::{Part, Refusal, SecretError};
use crate::keyed::{self, Key, Live};
use crate::mac::{from_base64, from_hex, hmac_sha1, sha256, to_base64, to_hex};
use crate::request::{Request, Scheme};
use crate::secret::text_secret;
use crate::time::UnixSeconds;

text_secret! {
    /// An account's auth token.
    "twilio"
}

/// Verifies what Twilio sends to one URL.
pub type Verifier = keyed::Verifier<Secret>;

impl Verifier {
    /// Creates a verifier that accepts any of `keys` for `public_url`: the URL as configured at
    /// Twilio, without its query.
    pub fn new(keys: impl IntoIterator<Item = Secret>, public_url: &str) -> Result<Self, SecretError> {
        Self::with(keys.into_iter().map(Live::always), PublicUrl::parse(public_url)?)
    }
}

impl Secret {
    /// Returns the headers that Twilio sends with a form to this URL, which may have a query, for
    /// tests of a receiver.
    pub fn sign(&self, url: &str, form: &[u8]) -> Vec<(String, String)> {
        let mut parts = vec![url.as_bytes()];
        let parameters = form_parameters(form);
        parts.extend(parameters.iter().flat_map(|(name, value)| [name.as_ref(), value.as_ref()]));
        let signature = to_base64(hmac_sha1(&self.0, &parts).bytes());
        let form = "application/x-www-form-urlencoded";
        vec![("x-twilio-signature".into(), signature), ("content-type".into(), form.into())]
    }
}

/// The claims of a request.
#[doc(hidden)]
pub struct Claim<'r> {
    urls: &'r PublicUrl,
    tail: Vec<u8>,
    signature: [u8; 20],
}

impl Key for Secret {
    const SCHEME: Scheme = Scheme::Twilio;
    type Settings = PublicUrl;
    type Claim<'r> = Claim<'r>;

    fn read<'r>(urls: &'r PublicUrl, request: &Request<'r>) -> Result<Claim<'r>, Refusal> {
        let signature = signature(request)?;
        Ok(Claim { urls, tail: signed_tail(request)?, signature })
    }

    fn read_head(_: &PublicUrl, request: &Request<'_>) -> Result<Option<UnixSeconds>, Refusal> {
        signature(request).map(|_| None)
    }

    fn signed(&self, claim: &Claim<'_>, _body: &[u8]) -> bool {
        let fits = |url: &String| hmac_sha1(&self.0, &[url.as_bytes(), &claim.tail]).is(&claim.signature);
        claim.urls.0.iter().any(fits)
    }

    fn digest(urls: &PublicUrl, claim: &Claim<'_>) -> Option<[u8; 32]> {
        // Always the configured spelling of the URL: the same message with or without the port is
        // one message.
        Some(sha256(&[urls.0[0].as_bytes(), &claim.tail]))
    }

    fn message_id(urls: &PublicUrl, claim: &Claim<'_>) -> Option<String> {
        Self::digest(urls, claim).map(|digest| format!("sha256:{}", to_hex(&digest)))
    }
}

fn signature(request: &Request<'_>) -> Result<[u8; 20], Refusal> {
    let header = request.headers.only(Part::Signature, "x-twilio-signature")?;
    from_base64(header).ok_or(Refusal::Malformed(Part::Signature))
}

/// Returns everything signed after the URL's path: the query, and the parameters of a form.
fn signed_tail(request: &Request<'_>) -> Result<Vec<u8>, Refusal> {
    let mut tail = Vec::new();
    if let Some(query) = request.query {
        tail.push(b'?');
        tail.extend_from_slice(query.as_bytes());
    }
    if let Some(hash) = body_hash(request.query)? {
        let hash: [u8; 32] = from_hex(hash).ok_or(Refusal::Malformed(Part::Signature))?;
        // Anyone can compute the hash of a body, so comparing it gives nothing away.
        return if sha256(&[request.body]) == hash { Ok(tail) } else { Err(Refusal::Mismatch) };
    }
    if request.body.is_empty() {
        return Ok(tail);
    }
    if !is_form(request) {
        return Err(Refusal::BodyUnsigned);
    }
    if pairs(request.body).nth(PARAMETERS_MAX).is_some() {
        return Err(Refusal::Malformed(Part::Body));
    }
    for (name, value) in form_parameters(request.body) {
        tail.extend_from_slice(&name);
        tail.extend_from_slice(&value);
    }
    Ok(tail)
}

/// Returns the query's single `bodySHA256`.
fn body_hash(query: Option<&str>) -> Result<Option<&str>, Refusal> {
    let mut hashes = query.unwrap_or_default().split('&').filter_map(|pair| pair.strip_prefix("bodySHA256="));
    match (hashes.next(), hashes.next()) {
        (_, Some(_)) => Err(Refusal::Duplicate(Part::Signature)),
        (hash, None) => Ok(hash),
    }
}

fn is_form(request: &Request<'_>) -> bool {
    let content_type = request.headers.only(Part::Signature, "content-type").unwrap_or_default();
    let media = content_type.split(';').next().unwrap_or_default().trim();
    media.eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

/// Most parameters of a form; Twilio sends a few dozen. Anybody can make us sort them, because that
/// comes before the signature is compared.
const PARAMETERS_MAX: usize = 1_000;

fn pairs(form: &[u8]) -> impl Iterator<Item = &[u8]> {
    form.split(|byte| *byte == b'&').filter(|pair| !pair.is_empty())
}

/// A parameter's name and value.
type Parameter<'f> = (Cow<'f, [u8]>, Cow<'f, [u8]>);

/// Returns the parameters, sorted and without duplicates.
fn form_parameters(form: &[u8]) -> Vec<Parameter<'_>> {
    let decoded = pairs(form).map(|pair| {
        let at = pair.iter().position(|byte| *byte == b'=');
        let (name, value) = at.map_or((pair, &[][..]), |at| (&pair[..at], &pair[at + 1..]));
        (form_decode(name), form_decode(value))
    });
    let mut parameters: Vec<_> = decoded.collect();
    parameters.sort_unstable();
    parameters.dedup();
    parameters
}

/// Decodes `+` to a space and `%XX` to a byte. Everything else, invalid escapes included, stays.
fn form_decode(text: &[u8]) -> Cow<'_, [u8]> {
    if !text.iter().any(|byte| matches!(byte, b'+' | b'%')) {
        return Cow::Borrowed(text);
    }
    let hex = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        match (byte, tail) {
            (b'+', _) => decoded.push(b' '),
            (b'%', [high, low, after @ ..]) if hex(*high).is_some() && hex(*low).is_some() => {
                decoded.extend(hex(*high).zip(hex(*low)).map(|(high, low)| high << 4 | low));
                rest = after;
            }
            _ => decoded.push(byte),
        }
    }
    Cow::Owned(decoded)
}

/// The URL as configured, and the same with the default port added or the port removed.
#[doc(hidden)]
#[derive(Debug, Clone)]
pub struct PublicUrl([String; 2]);

impl PublicUrl {
    pub(crate) fn parse(url: &str) -> Result<Self, SecretError> {
        let wrong = SecretError::Setting(
            "the public URL must be http(s)://host[:port]/path as given to Twilio, without a query",
        );
        let (scheme, rest) = url.split_once("://").ok_or(wrong.clone())?;
        let port = match scheme {
            "https" => "443",
            "http" => "80",
            _ => return Err(wrong),
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let forbidden = |c: char| matches!(c, '@' | '?' | '#') || c.is_whitespace() || c.is_control();
        if authority.is_empty() || rest.contains(forbidden) {
            return Err(wrong);
        }
        // The last colon separates a port, unless it is inside the brackets of an IPv6 literal.
        let twin = match authority.rsplit_once(':').filter(|(_, digits)| digits.bytes().all(|b| b.is_ascii_digit())) {
            Some((host, _)) => format!("{scheme}://{host}{path}"),
            None => format!("{scheme}://{authority}:{port}{path}"),
        };
        Ok(Self([url.to_owned(), twin]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::headers::Headers;
    use crate::request::{Verified, Verify};
    use crate::time::UnixSeconds;

    const FORM: &str = "application/x-www-form-urlencoded; charset=utf-8";
    const CALL: &str =
        "CallSid=CA1234567890ABCDE&Caller=%2B14158675309&From=%2B14158675309&Digits=1234&To=%2B18005551212";

    fn verify(url: &str, query: &str, kind: &str, body: &str, signature: &str) -> Result<Verified, Refusal> {
        let verifier = Verifier::new([Secret::unchecked("12345")], url).unwrap();
        let headers: Headers<'_> =
            [("X-Twilio-Signature", signature.as_bytes()), ("Content-Type", kind.as_bytes())].into_iter().collect();
        let query = (!query.is_empty()).then_some(query);
        verifier.verify(&Request { headers: &headers, query, body: body.as_bytes() }, UnixSeconds(0))
    }

    #[test]
    fn published_vectors_are_accepted() {
        let query = "foo=1&bar=2";
        let other = "Sid=CA123&SidAccount=AC123&Digits=5678&Digits=1234&Digits=1234";
        for (host, body, signature) in [
            ("mycompany.com", CALL, "RSOYDt4T1cUTdK1PDd93/VVr8B8="),
            ("MyCompany.com", CALL, "g9IN/x4Cft2g517EjYvEvM/W7LU="),
            ("MyCompany.com:1234", CALL, "PCqOZm8cnu/L6+u5i5fuEd+Iac4="),
            ("mycompany.com", other, "IK+Dwps556ElfBT0I3Rgjkr1wJU="),
            // With and without the port, as Twilio's own libraries accept.
            ("mycompany.com:443", CALL, "RSOYDt4T1cUTdK1PDd93/VVr8B8="),
        ] {
            let verified = verify(&format!("https://{host}/myapp.php"), query, FORM, body, signature);
            assert!(verified.is_ok(), "{host} {verified:?}");
        }
        let query = "foo=1&bar=2&bodySHA256=0a1ff7634d9ab3b95db5c9a2dfe9416e41502b283a80c7cf19632632f96e6620";
        let json = r#"{"property": "value", "boolean": true}"#;
        let check = |body| {
            verify("https://mycompany.com/myapp.php", query, "application/json", body, "a9nBmqA0ju/hNViExpshrM61xv4=")
        };
        assert!(check(json).is_ok());
        assert_eq!(check("{}"), Err(Refusal::Mismatch));
    }

    #[test]
    fn a_body_that_nothing_signs_is_refused() {
        // The signature of a call without parameters, with another body.
        let url = "https://mycompany.com/a";
        let signature = to_base64(hmac_sha1(&Secret::unchecked("12345").0, &[url.as_bytes()]).bytes());
        assert!(verify(url, "", FORM, "", &signature).is_ok());
        assert_eq!(verify(url, "", "application/json", "{}", &signature), Err(Refusal::BodyUnsigned));
        assert_eq!(verify(url, "", "", "a=b", &signature), Err(Refusal::BodyUnsigned));
        assert_eq!(verify(url, "", FORM, "a=b", &signature), Err(Refusal::Mismatch));
    }

    #[test]
    fn a_form_of_thousands_of_parameters_is_refused() {
        let url = "https://mycompany.com/a";
        let check = |count: usize| {
            let form: Vec<String> = (0..count).map(|n| format!("p{n}")).collect();
            let form = form.join("&");
            let signed = Secret::unchecked("12345").sign(url, form.as_bytes());
            verify(url, "", FORM, &form, &signed[0].1)
        };
        assert!(check(PARAMETERS_MAX).is_ok());
        assert_eq!(check(PARAMETERS_MAX + 1), Err(Refusal::Malformed(Part::Body)));
    }

    #[test]
    fn another_spelling_of_a_form_has_the_same_message_id() {
        let id = |body: &str| {
            let signature = "RSOYDt4T1cUTdK1PDd93/VVr8B8=";
            verify("https://mycompany.com/myapp.php", "foo=1&bar=2", FORM, body, signature).unwrap().message_id.unwrap()
        };
        let reordered =
            "To=%2b18005551212&CallSid=CA1234567890ABCDE&Caller=%2B14158675309&From=%2B14158675309&Digits=1234";
        assert_eq!(id(CALL), id(reordered));
    }

    #[test]
    fn only_a_plain_public_url_constructs() {
        for url in ["", "mycompany.com/a", "ftp://a/b", "https://", "https://u@h/a", "https://h/a?b", "https://h/#a"] {
            assert!(Verifier::new([Secret::unchecked("12345")], url).is_err(), "{url}");
        }
        assert_eq!(PublicUrl::parse("https://[::1]/a").unwrap().0[1], "https://[::1]:443/a");
        assert_eq!(PublicUrl::parse("http://h:80").unwrap().0[1], "http://h");
    }

    #[test]
    fn broken_escapes_stand_for_themselves() {
        assert_eq!(&*form_decode(b"a+b%20c%2Bd%zz%4"), b"a b c+d%zz%4");
    }
}
