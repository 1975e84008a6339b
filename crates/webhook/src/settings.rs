//! A verifier from configuration: scheme, secrets and a few settings as text.

use crate::error::SecretError;
use crate::request::{Scheme, Verify};
use crate::time::Tolerance;
use crate::{github, plain, shopify, slack, standard, stripe, twilio};

/// What a scheme needs beside its secrets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// How far a signed time may be off, where the scheme signs one.
    pub tolerance: Tolerance,
    /// Twilio: the URL as given to Twilio, without a query.
    pub public_url: Option<String>,
    /// Plain HMAC: what the sender does.
    pub layout: Option<plain::Layout>,
}

/// Makes the verifier of `scheme` that accepts any of `secrets`.
pub fn verifier(scheme: Scheme, secrets: &[&str], settings: &Settings) -> Result<Box<dyn Verify>, SecretError> {
    let tolerance = settings.tolerance;
    Ok(match scheme {
        Scheme::StandardWebhooks => {
            Box::new(standard::Verifier::new(all(secrets, standard::VerifyKey::parse)?)?.tolerance(tolerance))
        }
        Scheme::Stripe => Box::new(stripe::Verifier::new(all(secrets, stripe::Secret::new)?)?.tolerance(tolerance)),
        Scheme::GitHub => Box::new(github::Verifier::new(all(secrets, github::Secret::new)?)?),
        Scheme::Shopify => Box::new(shopify::Verifier::new(all(secrets, shopify::Secret::new)?)?),
        Scheme::Slack => Box::new(slack::Verifier::new(all(secrets, slack::Secret::new)?)?.tolerance(tolerance)),
        Scheme::Twilio => {
            let missing = SecretError::Setting("the twilio scheme needs public_url: the URL as given to Twilio");
            let url = settings.public_url.as_deref().ok_or(missing)?;
            Box::new(twilio::Verifier::new(all(secrets, twilio::Secret::new)?, url)?)
        }
        Scheme::Hmac => {
            let missing = SecretError::Setting("the hmac scheme needs a layout: at least the signature's header");
            let layout = settings.layout.clone().ok_or(missing)?;
            Box::new(plain::Verifier::new(all(secrets, plain::Secret::new)?, layout)?.tolerance(tolerance))
        }
        Scheme::Sns => {
            return Err(SecretError::Setting("sns has topics and certificates, not secrets: see sns::Verifier"));
        }
    })
}

fn all<K>(secrets: &[&str], parse: impl Fn(&str) -> Result<K, SecretError>) -> Result<Vec<K>, SecretError> {
    secrets.iter().map(|secret| parse(secret)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scheme_has_a_verifier_and_none_without_a_secret() {
        let settings = Settings {
            public_url: Some("https://example.org/in/x".into()),
            layout: Some(plain::Layout::new("x-sig")),
            ..Settings::default()
        };
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        for scheme in Scheme::ALL.into_iter().filter(|scheme| *scheme != Scheme::Sns) {
            assert_eq!(verifier(scheme, &[secret], &settings).unwrap().scheme(), scheme);
            assert_eq!(verifier(scheme, &[], &settings).unwrap_err(), SecretError::None);
            assert!(verifier(scheme, &[secret, ""], &settings).is_err(), "{scheme}");
            assert_eq!(scheme.as_str().parse(), Ok(scheme));
        }
        for scheme in [Scheme::Twilio, Scheme::Hmac, Scheme::Sns] {
            assert!(matches!(verifier(scheme, &[secret], &Settings::default()), Err(SecretError::Setting(_))));
        }
    }
}
