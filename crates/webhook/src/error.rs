//! Errors: a message is refused, a secret is unusable, or something cannot be signed.

/// The part of a request that a refusal is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// The signature header.
    Signature,
    /// The timestamp.
    Timestamp,
    /// The message id.
    Id,
    /// Another field of the body that the signature covers (SNS).
    Field,
    /// The body as a whole (SNS: it holds the signature).
    Body,
}

impl Part {
    fn word(self) -> &'static str {
        match self {
            Self::Signature => "signature",
            Self::Timestamp => "timestamp",
            Self::Id => "message id",
            Self::Field => "signed field",
            Self::Body => "body",
        }
    }
}

/// Why a request was refused.
///
/// It is for the owner of the endpoint: logs, and counters by [`Refusal::code`]. The sender must
/// not learn which one it was, so answer all of them alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A part that the scheme needs is missing.
    #[error("the request has no {}: is the right scheme configured for this sender?", .0.word())]
    Missing(Part),
    /// A part that must occur once occurs twice, equal or not.
    #[error("the request has more than one {}", .0.word())]
    Duplicate(Part),
    /// A part does not have the scheme's format: wrong encoding, wrong length, a timestamp that is
    /// not plain digits, an id with a dot.
    #[error("the {} is not in the form this scheme requires", .0.word())]
    Malformed(Part),
    /// There are signatures, but none of an accepted version. There is no fallback to older
    /// versions.
    #[error("no signature has an accepted version; older versions are never accepted")]
    VersionUnsupported,
    /// SNS: signed with SHA-1. The cure is a setting of the sender's topic.
    #[error("signed with SHA-1, which is not accepted: set the topic's SignatureVersion to 2")]
    VersionOutdated,
    /// SNS: the message is from a topic that is not yours, genuine or not.
    #[error("the message is of a topic that is not allowed")]
    TopicNotAllowed,
    /// SNS: the certificate's URL is not one of AWS.
    #[error("the certificate's URL is not one of AWS SNS itself: a forgery")]
    CertificateUrlRefused,
    /// SNS: the URL that confirms the subscription leads elsewhere, or confirms something else.
    #[error("the confirmation's URL is not one of AWS SNS itself, or not for this topic and token")]
    SubscribeUrlRefused,
    /// SNS: the certificate given is not the one that the message names.
    #[error("the given certificate is not the one that the message names")]
    CertificateOther,
    /// SNS: the certificate is not valid at this time.
    #[error("the certificate has expired or is not valid yet: an old message, or a wrong clock")]
    CertificateExpired,
    /// Well-formed, but made with another key or over other bytes.
    #[error("no signature fits a configured key: the secrets differ, or the body was changed on the way")]
    Mismatch,
    /// Made with an old key whose overlap has ended ([`crate::Verifier::retiring`]).
    #[error("signed with an old key whose end has passed: does the sender still use it, or was it stolen?")]
    KeyRetired,
    /// The body is not covered by the signature (Twilio: neither a form nor a body hash).
    #[error("the signature does not cover the body")]
    BodyUnsigned,
    /// Genuine, but signed longer ago than the tolerance: a replay, or a wrong clock.
    #[error("the message is genuine but was signed too long ago: a replay, or a wrong clock")]
    TooOld,
    /// Genuine, but signed further in the future than the tolerance: a wrong clock.
    #[error("the message is genuine but was signed in the future: a clock is wrong")]
    TooNew,
}

impl Refusal {
    /// Every refusal, for tables of counters.
    pub const ALL: [Self; 25] = {
        let mut all = [Self::Mismatch; 25];
        let mut at = 0;
        while at < all.len() {
            all[at] = CODES[at].0;
            at += 1;
        }
        all
    };

    /// Returns the stable snake_case code for counters and logs.
    pub fn code(self) -> &'static str {
        // A body cannot be missing or occur twice; it can only be malformed.
        CODES.iter().find(|(refusal, _)| *refusal == self).map_or("body_malformed", |(_, code)| *code)
    }

    /// Whether the message was genuine and only its time was out of tolerance.
    pub fn is_stale(self) -> bool {
        matches!(self, Self::TooOld | Self::TooNew)
    }
}

const CODES: [(Refusal, &str); 25] = [
    (Refusal::Missing(Part::Signature), "signature_missing"),
    (Refusal::Missing(Part::Timestamp), "timestamp_missing"),
    (Refusal::Missing(Part::Id), "id_missing"),
    (Refusal::Duplicate(Part::Signature), "signature_duplicate"),
    (Refusal::Duplicate(Part::Timestamp), "timestamp_duplicate"),
    (Refusal::Duplicate(Part::Id), "id_duplicate"),
    (Refusal::Malformed(Part::Signature), "signature_malformed"),
    (Refusal::Malformed(Part::Timestamp), "timestamp_malformed"),
    (Refusal::Malformed(Part::Id), "id_malformed"),
    (Refusal::Missing(Part::Field), "field_missing"),
    (Refusal::Duplicate(Part::Field), "field_duplicate"),
    (Refusal::Malformed(Part::Field), "field_malformed"),
    (Refusal::Malformed(Part::Body), "body_malformed"),
    (Refusal::VersionUnsupported, "signature_version_unsupported"),
    (Refusal::VersionOutdated, "signature_version_outdated"),
    (Refusal::TopicNotAllowed, "topic_not_allowed"),
    (Refusal::CertificateUrlRefused, "certificate_url_refused"),
    (Refusal::SubscribeUrlRefused, "subscribe_url_refused"),
    (Refusal::CertificateOther, "certificate_other"),
    (Refusal::CertificateExpired, "certificate_expired"),
    (Refusal::Mismatch, "signature_mismatch"),
    (Refusal::KeyRetired, "key_retired"),
    (Refusal::BodyUnsigned, "body_unsigned"),
    (Refusal::TooOld, "timestamp_too_old"),
    (Refusal::TooNew, "timestamp_too_new"),
];

/// Why a key or a verifier cannot be constructed. Never contains the secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// No key at all.
    #[error("no secret is given; a verifier without one would accept nobody or everybody")]
    None,
    /// More keys than a rotation needs.
    #[error("{given} secrets are given; at most {max} may be live at once")]
    TooMany {
        /// Number of keys given.
        given: usize,
        /// Most keys allowed.
        max: usize,
    },
    /// The key has fewer or more bytes than the scheme allows.
    #[error("the secret has {given} bytes; {scheme} needs {min} to {max}")]
    Length {
        /// The scheme.
        scheme: &'static str,
        /// Bytes given, after decoding.
        given: usize,
        /// Fewest bytes.
        min: usize,
        /// Most bytes.
        max: usize,
    },
    /// The text is not base64, where it must be.
    #[error("the secret is not valid base64 after its {prefix} prefix")]
    Encoding {
        /// The prefix.
        prefix: &'static str,
    },
    /// The prefix belongs to another kind of key.
    #[error("the secret must begin with {expected}; another provider's secret, or another kind of key?")]
    Prefix {
        /// The prefix it must have.
        expected: &'static str,
    },
    /// The bytes are not a key of their algorithm.
    #[error("the bytes are no valid Ed25519 key")]
    Key,
    /// A setting of the scheme is unusable.
    #[error("{0}")]
    Setting(&'static str),
}

/// Why something cannot be signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignError {
    /// The id is empty, longer than 255 bytes, or contains a dot, white space or anything but
    /// visible ASCII.
    #[error("a message id has 1 to 255 visible ASCII characters and no dot")]
    Id,
    /// The timestamp is negative or too large.
    #[error("the timestamp is not a positive number of seconds of at most 12 digits")]
    Timestamp,
}
