//! The contents of a genuine message.

use std::fmt;

use super::urls::{SubscribeUrl, is_region};
use crate::error::SecretError;
use crate::request::Verified;
use crate::time::UnixSeconds;

/// The ARN of a topic, `arn:aws:sns:REGION:ACCOUNT:NAME`, of any partition.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TopicArn(String);

impl TopicArn {
    /// Parses the ARN of one topic. There are no patterns: messages of other topics are refused.
    pub fn parse(arn: &str) -> Result<Self, SecretError> {
        let wrong = SecretError::Setting("a topic is arn:aws:sns:REGION:ACCOUNT:NAME, with an account of 12 digits");
        let parts: Vec<&str> = arn.split(':').collect();
        let ["arn", partition, "sns", region, account, name] = parts.as_slice() else { return Err(wrong) };
        let known = matches!(*partition, "aws" | "aws-cn" | "aws-us-gov") && is_region(region);
        let numbered = account.len() == 12 && account.bytes().all(|byte| byte.is_ascii_digit());
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        let stem = name.strip_suffix(".fifo").unwrap_or(name);
        let named = (1..=256).contains(&name.len()) && !stem.is_empty() && stem.bytes().all(plain);
        if known && numbered && named { Ok(Self(arn.to_owned())) } else { Err(wrong) }
    }

    /// The ARN's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TopicArn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A genuine message. The signature covers all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Something was published.
    Notification(Notification),
    /// Somebody wants to subscribe this endpoint: visit the URL to agree.
    SubscriptionConfirmation(Confirmation),
    /// The endpoint was unsubscribed. Visiting the URL would subscribe it again.
    UnsubscribeConfirmation(Confirmation),
}

impl Message {
    /// The message's id, the same in every retry.
    pub fn message_id(&self) -> &str {
        match self {
            Self::Notification(it) => &it.message_id,
            Self::SubscriptionConfirmation(it) | Self::UnsubscribeConfirmation(it) => &it.message_id,
        }
    }

    /// The topic, one of the allowed ones.
    pub fn topic_arn(&self) -> &TopicArn {
        match self {
            Self::Notification(it) => &it.topic_arn,
            Self::SubscriptionConfirmation(it) | Self::UnsubscribeConfirmation(it) => &it.topic_arn,
        }
    }

    /// When it was published.
    pub fn published_at(&self) -> UnixSeconds {
        match self {
            Self::Notification(it) => it.published_at,
            Self::SubscriptionConfirmation(it) | Self::UnsubscribeConfirmation(it) => it.published_at,
        }
    }

    /// The same as the result of other schemes. The certificate's key is the only one, so its index
    /// is 0.
    pub fn verified(&self) -> Verified {
        let message_id = Some(self.message_id().to_owned());
        Verified { message_id, signed_at: Some(self.published_at()), digest: Some(*self.digest()), key: 0 }
    }

    /// SHA-256 of the signed text, the same for every way to write the JSON around it.
    pub fn digest(&self) -> &[u8; 32] {
        match self {
            Self::Notification(it) => &it.digest,
            Self::SubscriptionConfirmation(it) | Self::UnsubscribeConfirmation(it) => &it.digest,
        }
    }
}

/// `Type` is `Notification`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notification {
    /// The message's id.
    pub message_id: String,
    /// The topic.
    pub topic_arn: TopicArn,
    /// The subject, if it was published with one.
    pub subject: Option<String>,
    /// The published text.
    pub message: String,
    /// When it was published.
    pub published_at: UnixSeconds,
    /// SHA-256 of the signed text.
    pub digest: [u8; 32],
}

/// `Type` is `SubscriptionConfirmation` or `UnsubscribeConfirmation`.
#[derive(Clone, PartialEq, Eq)]
pub struct Confirmation {
    /// The message's id.
    pub message_id: String,
    /// The topic.
    pub topic_arn: TopicArn,
    /// A text for people.
    pub message: String,
    /// The token for the `ConfirmSubscription` API call; the URL contains it, too.
    pub token: String,
    /// The URL to visit, once.
    pub subscribe_url: SubscribeUrl,
    /// When it was first sent.
    pub published_at: UnixSeconds,
    /// SHA-256 of the signed text.
    pub digest: [u8; 32],
}

impl fmt::Debug for Confirmation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Confirmation({} of {})", self.message_id, self.topic_arn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_names_of_topics_are_taken() {
        for arn in [
            "arn:aws:sns:us-east-1:123456789012:a",
            "arn:aws:sns:us-east-1:123456789012:My-Topic_1.fifo",
            "arn:aws-cn:sns:cn-north-1:123456789012:a",
            "arn:aws-us-gov:sns:us-gov-west-1:123456789012:a",
        ] {
            assert_eq!(TopicArn::parse(arn).unwrap().as_str(), arn);
        }
        for arn in [
            "",
            "*",
            "arn:aws:sns:*:123456789012:a",
            "arn:aws:sns:us-east-1:123456789012:*",
            "arn:aws:sns:us-east-1:123456789012:",
            "arn:aws:sns:us-east-1:123456789012:.fifo",
            "arn:aws:sns:us-east-1:123456789012:a:subscription",
            "arn:aws:sns:us-east-1:12345678901:a",
            "arn:aws:sqs:us-east-1:123456789012:a",
            "arn:evil:sns:us-east-1:123456789012:a",
            " arn:aws:sns:us-east-1:123456789012:a",
            "arn:aws:sns:us-east-1:123456789012:a\n",
        ] {
            assert!(TopicArn::parse(arn).is_err(), "{arn:?}");
        }
    }
}
