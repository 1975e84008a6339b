//! The URLs that a message may name.

use std::fmt;

/// Longest URL; AWS's for confirmations have some 400 bytes.
const URL_BYTES_MAX: usize = 2_048;

/// Longest URL of a certificate; AWS's have some 110 bytes.
const CERTIFICATE_URL_BYTES_MAX: usize = 256;

/// Longest region name; the longest existing one has 14 bytes.
const REGION_BYTES_MAX: usize = 32;

/// A certificate's URL: `https://sns.REGION.amazonaws.com/NAME.pem`, or `.com.cn` for a Chinese
/// region.
///
/// The host is compared exactly. It has no user, port, query or fragment, one path segment of
/// letters, digits, `-` and `_`, and no escapes. There is only one spelling, the one AWS uses, so
/// the text is the cache key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CertificateUrl(String);

impl CertificateUrl {
    /// Parses the URL; `None` unless AWS itself serves it.
    pub fn parse(url: &str) -> Option<Self> {
        let name = path_at_aws(url)?.strip_suffix(".pem")?;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        let fits = !name.is_empty() && name.bytes().all(plain) && url.len() <= CERTIFICATE_URL_BYTES_MAX;
        fits.then(|| Self(url.to_owned()))
    }

    /// The URL to fetch, which is also the cache key.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CertificateUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The URL that confirms a subscription when it is visited: on the same hosts, at the root path,
/// with a query that confirms this topic with this token.
///
/// The token is a capability: never log it.
#[derive(Clone, PartialEq, Eq)]
pub struct SubscribeUrl(String);

impl SubscribeUrl {
    pub(super) fn parse(url: &str, topic_arn: &str, token: &str) -> Option<Self> {
        let query = path_at_aws(url)?.strip_prefix('?')?;
        if !query.bytes().all(is_query_byte) {
            return None;
        }
        let only = |name: &str| {
            let mut values = query.split('&').filter_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            values.next().filter(|_| values.next().is_none())
        };
        let says = |name, value: &str| only(name).and_then(unescape).is_some_and(|text| text == value.as_bytes());
        let confirms = says("Action", "ConfirmSubscription") && says("TopicArn", topic_arn) && says("Token", token);
        confirms.then(|| Self(url.to_owned()))
    }

    /// The URL to fetch, once, to confirm.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SubscribeUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SubscribeUrl(…)")
    }
}

/// Returns the text after `https://sns.REGION.amazonaws.com/` (or `.com.cn/`), if the URL begins
/// exactly like that.
fn path_at_aws(url: &str) -> Option<&str> {
    if url.len() > URL_BYTES_MAX {
        return None;
    }
    let (host, path) = url.strip_prefix("https://")?.split_once('/')?;
    let rest = host.strip_prefix("sns.")?;
    let (region, suffix) = rest.split_once('.')?;
    let expected = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
    (is_region(region) && suffix == expected).then_some(path)
}

/// `us-east-1`, `us-gov-west-1`, `cn-north-1`: two letters, words, a number of one or two digits.
pub(super) fn is_region(region: &str) -> bool {
    let word = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_lowercase());
    let parts: Vec<&str> = region.split('-').collect();
    let [area, words @ .., number] = parts.as_slice() else { return false };
    let numbered = (1..=2).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit());
    let named = area.len() == 2 && word(area) && !words.is_empty() && words.iter().all(|part| word(part));
    region.len() <= REGION_BYTES_MAX && named && numbered
}

/// Characters that a query may contain unescaped without ending it or confusing a parser.
fn is_query_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~:/%&=+".contains(&byte)
}

/// Decodes `%XX`; `None` for an invalid escape.
fn unescape(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte == b'%' {
            let pair = std::str::from_utf8(rest.get(..2)?).ok()?;
            let plain = pair.bytes().all(|digit| digit.is_ascii_hexdigit());
            bytes.push(u8::from_str_radix(pair, 16).ok().filter(|_| plain)?);
            rest = &rest[2..];
        } else {
            bytes.push(byte);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_come_from_aws_itself() {
        for url in [
            "https://sns.us-east-1.amazonaws.com/SimpleNotificationService-01d088a6f77103d0fe307c0069e40ed6.pem",
            "https://sns.us-gov-west-1.amazonaws.com/a.pem",
            "https://sns.ap-southeast-2.amazonaws.com/a_B-9.pem",
            "https://sns.cn-north-1.amazonaws.com.cn/SimpleNotificationService-a.pem",
        ] {
            assert_eq!(CertificateUrl::parse(url).map(|url| url.to_string()).as_deref(), Some(url));
        }
    }

    #[test]
    fn certificates_come_from_nowhere_else() {
        let long = format!("https://sns.us-east-1.amazonaws.com/{}.pem", "a".repeat(2_100));
        for url in [
            "",
            "https://",
            "https://sns.us-east-1.amazonaws.com",
            "https://sns.us-east-1.amazonaws.com/",
            "https://sns.us-east-1.amazonaws.com/.pem",
            "https://sns.us-east-1.amazonaws.com/a.pem2",
            "https://sns.us-east-1.amazonaws.com/a.PEM",
            "https://sns.us-east-1.amazonaws.com/a.pem ",
            " https://sns.us-east-1.amazonaws.com/a.pem",
            "https://sns.us-east-1.amazonaws.com/a.pem\n",
            "https://sns.us-east-1.amazonaws.com/b/a.pem",
            "https://sns.us-east-1.amazonaws.com//a.pem",
            "https://sns.us-east-1.amazonaws.com/../a.pem",
            "https://sns.us-east-1.amazonaws.com/%2e.pem",
            "https://sns.us-east-1.amazonaws.com/a.pem?",
            "https://sns.us-east-1.amazonaws.com/a.pem?x=1",
            "https://sns.us-east-1.amazonaws.com/?x=a.pem",
            "https://sns.us-east-1.amazonaws.com?/a.pem",
            "https://sns.us-east-1.amazonaws.com#/a.pem",
            "https://sns.us-east-1.amazonaws.com/a.pem#b",
            "https://sns.us-east-1.amazonaws.com/#.pem",
            "https://sns.us-east-1.amazonaws.com:443/a.pem",
            "https://sns.us-east-1.amazonaws.com:/a.pem",
            "https://sns.us-east-1.amazonaws.com./a.pem",
            "https://user@sns.us-east-1.amazonaws.com/a.pem",
            "https://sns.us-east-1.amazonaws.com@evil.example/a.pem",
            "https://evil.example/sns.us-east-1.amazonaws.com/a.pem",
            "https://evil.example\\@sns.us-east-1.amazonaws.com/a.pem",
            "https:\\\\sns.us-east-1.amazonaws.com\\a.pem",
            "https:///sns.us-east-1.amazonaws.com/a.pem",
            "//sns.us-east-1.amazonaws.com/a.pem",
            "http://sns.us-east-1.amazonaws.com/a.pem",
            "HTTPS://sns.us-east-1.amazonaws.com/a.pem",
            "https://SNS.us-east-1.amazonaws.com/a.pem",
            "https://sns.us-east-1.amazonaws.COM/a.pem",
            "https://sns.us-east-1.amazonaws.com.evil.example/a.pem",
            "https://sns.us-east-1.amazonaws.com.cn/a.pem",
            "https://sns.cn-north-1.amazonaws.com/a.pem",
            "https://sns.us-east-1.amazonaws.com.co/a.pem",
            "https://sns.us-east-1.amazonaws.org/a.pem",
            "https://sns.us-east-1.evilamazonaws.com/a.pem",
            "https://sns.us-east-1.s3.amazonaws.com/a.pem",
            "https://sns.s3.amazonaws.com/a.pem",
            "https://sns.amazonaws.com/a.pem",
            "https://sns..amazonaws.com/a.pem",
            "https://sns.us-east-1..amazonaws.com/a.pem",
            "https://s3.us-east-1.amazonaws.com/a.pem",
            "https://bucket.sns.us-east-1.amazonaws.com/a.pem",
            "https://xsns.us-east-1.amazonaws.com/a.pem",
            "https://sns-us-east-1.amazonaws.com/a.pem",
            "https://sns.us-east-1-amazonaws.com/a.pem",
            "https://sns.us-east.amazonaws.com/a.pem",
            "https://sns.us-1.amazonaws.com/a.pem",
            "https://sns.us-east-111.amazonaws.com/a.pem",
            "https://sns.usa-east-1.amazonaws.com/a.pem",
            "https://sns.us-East-1.amazonaws.com/a.pem",
            "https://sns.us--1.amazonaws.com/a.pem",
            "https://sns.us-east-1%2eevil.example/a.pem",
            "https://sns.us-eäst-1.amazonaws.com/a.pem",
            "https://sns.us-east-1.amazonaws。com/a.pem",
            "https://127.0.0.1/a.pem",
            "https://[::1]/a.pem",
            "file:///a.pem",
            long.as_str(),
        ] {
            assert_eq!(CertificateUrl::parse(url), None, "{url:?}");
        }
    }

    #[test]
    fn a_confirmation_confirms_its_own_topic_at_aws() {
        const ARN: &str = "arn:aws:sns:us-west-2:123456789012:MyTopic";
        let fits = |url: &str| SubscribeUrl::parse(url, ARN, "2336412f37").is_some();
        let host = "https://sns.us-west-2.amazonaws.com";
        let query = format!("Action=ConfirmSubscription&TopicArn={ARN}&Token=2336412f37");
        assert!(fits(&format!("{host}/?{query}")));
        assert!(fits(&format!("{host}/?{}", query.replace(':', "%3A"))));
        for url in [
            String::new(),
            format!("http://sns.us-west-2.amazonaws.com/?{query}"),
            format!("https://sns.us-west-2.amazonaws.com.evil.example/?{query}"),
            format!("https://169.254.169.254/?{query}"),
            format!("{host}:443/?{query}"),
            format!("{host}?{query}"),
            format!("{host}/path?{query}"),
            format!("{host}/?{query}#x"),
            format!("{host}/?{query}&Token=other"),
            format!("{host}/?{query} "),
            format!("{host}/?{}", query.replace("Confirm", "Delete")),
            format!("{host}/?{}", query.replace("MyTopic", "Other")),
            format!("{host}/?{}", query.replace("2336412f37", "2336412f3")),
            format!("{host}/?{}", query.replace(":sns", "%3sns")),
            format!("{host}/?{}", query.replace(":sns", "%+Asns")),
        ] {
            assert!(!fits(&url), "{url:?}");
        }
        let url = SubscribeUrl::parse(&format!("{host}/?{query}"), ARN, "2336412f37").unwrap();
        assert!(!format!("{url:?}").contains("2336412f37"), "the token is a capability");
    }
}
