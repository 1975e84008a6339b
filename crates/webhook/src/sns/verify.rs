//! Reads a body, and verifies it once its certificate is known.

use std::collections::BTreeSet;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use x509_cert::der::DateTime;

use super::TOLERANCE;
use super::certificate::Certificate;
use super::fields::{Field, Fields};
use super::message::{Confirmation, Message, Notification, TopicArn};
use super::urls::{CertificateUrl, SubscribeUrl};
use crate::error::{Part, Refusal, SecretError};
use crate::mac::sha256;
use crate::time::{Tolerance, UnixSeconds};

/// Longest message id; AWS uses UUIDs.
const ID_BYTES_MAX: usize = 255;

/// Longest base64 signature: that of a key of 8192 bits.
const SIGNATURE_BYTES_MAX: usize = 1_368;

/// Verifies SNS messages of the allowed topics.
///
/// AWS signs for everybody: anybody with an account can send a genuine message to your endpoint.
/// Only the topic shows that a message is yours.
#[derive(Debug, Clone)]
pub struct Verifier {
    topics: BTreeSet<TopicArn>,
    tolerance: Tolerance,
}

impl Verifier {
    /// Creates a verifier that accepts messages of these topics, at least one.
    pub fn new(topics: impl IntoIterator<Item = TopicArn>) -> Result<Self, SecretError> {
        let topics: BTreeSet<TopicArn> = topics.into_iter().collect();
        if topics.is_empty() {
            return Err(SecretError::Setting("no topic is allowed, and SNS signs for every AWS account; name yours"));
        }
        Ok(Self { topics, tolerance: TOLERANCE })
    }

    /// Sets how far the time of publishing may be from now, retries included: see [`TOLERANCE`].
    #[must_use]
    pub fn tolerance(mut self, tolerance: Tolerance) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// Reads a body, and refuses one that no certificate could make acceptable. Cheap and without
    /// I/O; nothing in the result is proven yet.
    pub fn read(&self, body: &[u8]) -> Result<Unverified, Refusal> {
        let mut fields = Fields::parse(body)?;
        match fields.take(Field::SignatureVersion)?.as_str() {
            "2" => {}
            "1" => return Err(Refusal::VersionOutdated),
            _ => return Err(Refusal::VersionUnsupported),
        }
        let signature = fields.take(Field::Signature)?;
        let signature = Some(signature).filter(|text| (1..=SIGNATURE_BYTES_MAX).contains(&text.len()));
        let signature = signature.and_then(|text| STANDARD.decode(text).ok());
        let certificate_url = fields.take(Field::SigningCertUrl)?;
        let topic_arn = fields.take(Field::TopicArn)?;
        // The configured ARN is used from here on, not the sender's text.
        let topic_arn = self.topics.iter().find(|topic| topic.as_str() == topic_arn).cloned();
        let topic_arn = topic_arn.ok_or(Refusal::TopicNotAllowed)?;
        let certificate_url = CertificateUrl::parse(&certificate_url).ok_or(Refusal::CertificateUrlRefused)?;
        let signature = signature.ok_or(Refusal::Malformed(Part::Signature))?;
        let (message, signed) = assemble(&mut fields, topic_arn)?;
        Ok(Unverified { message, signed, signature, certificate_url, tolerance: self.tolerance })
    }
}

/// A well-formed message of an allowed topic. Anybody could have written it.
#[derive(Debug, Clone)]
pub struct Unverified {
    message: Message,
    signed: String,
    signature: Vec<u8>,
    certificate_url: CertificateUrl,
    tolerance: Tolerance,
}

impl Unverified {
    /// The URL of the certificate that [`Unverified::verify`] needs.
    pub fn certificate_url(&self) -> &CertificateUrl {
        &self.certificate_url
    }

    /// Returns the message if the certificate is the one it names, is valid now and signed it, and
    /// if it was published within the tolerance of `now`.
    pub fn verify(self, certificate: &Certificate, now: UnixSeconds) -> Result<Message, Refusal> {
        if *certificate.url() != self.certificate_url {
            return Err(Refusal::CertificateOther);
        }
        if !certificate.is_valid_at(now) {
            return Err(Refusal::CertificateExpired);
        }
        if !certificate.signed(self.signed.as_bytes(), &self.signature) {
            return Err(Refusal::Mismatch);
        }
        self.tolerance.check(self.message.published_at(), now)?;
        Ok(self.message)
    }
}

/// Returns the message, and the text of it that AWS signs.
fn assemble(fields: &mut Fields, topic_arn: TopicArn) -> Result<(Message, String), Refusal> {
    let kind = fields.take(Field::Type)?;
    let message_id = fields.take(Field::MessageId)?;
    let graphic = message_id.bytes().all(|byte| byte.is_ascii_graphic());
    if !graphic || !(1..=ID_BYTES_MAX).contains(&message_id.len()) {
        return Err(Refusal::Malformed(Part::Id));
    }
    let timestamp = fields.take(Field::Timestamp)?;
    let published_at = published_at(&timestamp).ok_or(Refusal::Malformed(Part::Timestamp))?;
    let message = fields.take(Field::Message)?;
    let signed = Lines::default().add(Field::Message, &message).add(Field::MessageId, &message_id);
    if kind == "Notification" {
        let subject = fields.take_optional(Field::Subject)?;
        let signed = match &subject {
            Some(subject) => signed.add(Field::Subject, single_line(subject)?),
            None => signed,
        };
        let signed = signed.add(Field::Timestamp, &timestamp).finish(&topic_arn, &kind);
        let digest = sha256(&[signed.as_bytes()]);
        let notification = Notification { message_id, topic_arn, subject, message, published_at, digest };
        return Ok((Message::Notification(notification), signed));
    }
    let wrap = match kind.as_str() {
        "SubscriptionConfirmation" => Message::SubscriptionConfirmation,
        "UnsubscribeConfirmation" => Message::UnsubscribeConfirmation,
        _ => return Err(Refusal::Malformed(Part::Field)),
    };
    let token = fields.take(Field::Token)?;
    let url = fields.take(Field::SubscribeUrl)?;
    let subscribe_url = SubscribeUrl::parse(&url, topic_arn.as_str(), &token).ok_or(Refusal::SubscribeUrlRefused)?;
    let signed = signed
        .add(Field::SubscribeUrl, &url)
        .add(Field::Timestamp, &timestamp)
        .add(Field::Token, single_line(&token)?)
        .finish(&topic_arn, &kind);
    let digest = sha256(&[signed.as_bytes()]);
    let confirmation = Confirmation { message_id, topic_arn, message, token, subscribe_url, published_at, digest };
    Ok((wrap(confirmation), signed))
}

/// `Name\nValue\n` for each signed field.
#[derive(Default)]
struct Lines(String);

impl Lines {
    fn add(mut self, field: Field, value: &str) -> Self {
        for part in [field.name(), "\n", value, "\n"] {
            self.0.push_str(part);
        }
        self
    }

    /// Ends the text, in the same way for every kind of message.
    fn finish(self, topic_arn: &TopicArn, kind: &str) -> String {
        self.add(Field::TopicArn, topic_arn.as_str()).add(Field::Type, kind).0
    }
}

/// Only the message itself may contain line breaks: in other values they would give the signed text
/// a second reading.
fn single_line(text: &str) -> Result<&str, Refusal> {
    if text.chars().any(char::is_control) { Err(Refusal::Malformed(Part::Field)) } else { Ok(text) }
}

/// Parses `2012-05-02T00:54:06.655Z`, with or without a fraction, and no other format.
fn published_at(text: &str) -> Option<UnixSeconds> {
    const FORM: &[u8; 19] = b"0000-00-00T00:00:00";
    let (whole, rest) = text.as_bytes().split_first_chunk::<19>()?;
    let fits = |(byte, form): (&u8, &u8)| if *form == b'0' { byte.is_ascii_digit() } else { byte == form };
    if !whole.iter().zip(FORM).all(fits) {
        return None;
    }
    let digits = match rest {
        b"Z" => &b"0"[..],
        [b'.', digits @ .., b'Z'] => digits,
        _ => return None,
    };
    if !(1..=9).contains(&digits.len()) || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number =
        |from: usize, to: usize| whole[from..to].iter().fold(0_u16, |sum, digit| sum * 10 + u16::from(digit - b'0'));
    let small = |from: usize| u8::try_from(number(from, from + 2)).ok();
    let time = DateTime::new(number(0, 4), small(5)?, small(8)?, small(11)?, small(14)?, small(17)?).ok()?;
    i64::try_from(time.unix_duration().as_secs()).ok().map(UnixSeconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_form_of_time_is_read() {
        assert_eq!(published_at("2012-05-02T00:54:06.655Z"), Some(UnixSeconds(1_335_920_046)));
        assert_eq!(published_at("2024-02-29T23:59:59Z"), Some(UnixSeconds(1_709_251_199)));
        assert_eq!(published_at("1970-01-01T00:00:00.000Z"), Some(UnixSeconds(0)));
        for wrong in [
            "",
            "1335920046",
            "2012-05-02T00:54:06",
            "2012-05-02T00:54:06.Z",
            "2012-05-02T00:54:06.0000000000Z",
            "2012-05-02T00:54:06,655Z",
            "2012-05-02T00:54:06+00:00",
            "2012-05-02T00:54:06z",
            "2012-05-02t00:54:06Z",
            "2012-05-02 00:54:06Z",
            "2012-05-02T00:54:06.655Z\n",
            " 2012-05-02T00:54:06.655Z",
            "+012-05-02T00:54:06Z",
            "2012-5-2T00:54:06Z",
            "2023-02-29T00:00:00Z",
            "2012-13-01T00:00:00Z",
            "2012-05-02T24:00:00Z",
            "2012-05-02T00:60:00Z",
            "2012-05-02T00:54:60Z",
            "1969-12-31T23:59:59Z",
            "20120-05-02T00:54:06Z",
            "२०१२-05-02T00:54:06Z",
        ] {
            assert_eq!(published_at(wrong), None, "{wrong:?}");
        }
    }
}
