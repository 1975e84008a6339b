//! Builds a verifier from configuration: scheme, secrets and a few settings as text.

use crate::error::SecretError;
use crate::keyed::{Key, Live, Verifier};
use crate::request::{Scheme, Verify};
use crate::time::{Tolerance, UnixSeconds};
use crate::{github, plain, shopify, slack, standard, stripe, twilio};

/// What a scheme needs besides its secrets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// How far a signed time may be from now, where the scheme signs one.
    pub tolerance: Tolerance,
    /// Twilio: the URL as configured at Twilio, without a query.
    pub public_url: Option<String>,
    /// Plain HMAC: the sender's scheme.
    pub layout: Option<plain::Layout>,
}

/// Builds a verifier of `scheme` that accepts any of `secrets`.
pub fn verifier(scheme: Scheme, secrets: &[&str], settings: &Settings) -> Result<Box<dyn Verify>, SecretError> {
    let secrets: Vec<_> = secrets.iter().map(|secret| (*secret, None)).collect();
    verifier_in_rotation(scheme, &secrets, settings)
}

/// The same for secrets of which some have an end, the last second at which they verify
/// ([`crate::Verifier::retiring`]). At least one must have no end.
pub fn verifier_in_rotation(
    scheme: Scheme,
    secrets: &[(&str, Option<UnixSeconds>)],
    settings: &Settings,
) -> Result<Box<dyn Verify>, SecretError> {
    match scheme {
        Scheme::StandardWebhooks => make(secrets, standard::VerifyKey::parse, (), settings),
        Scheme::Stripe => make(secrets, stripe::Secret::new, (), settings),
        Scheme::GitHub => make(secrets, github::Secret::new, (), settings),
        Scheme::Shopify => make(secrets, shopify::Secret::new, (), settings),
        Scheme::Slack => make(secrets, slack::Secret::new, (), settings),
        Scheme::Twilio => {
            let missing = SecretError::Setting("the twilio scheme needs public_url: the URL as configured at Twilio");
            let url = settings.public_url.as_deref().ok_or(missing)?;
            make(secrets, twilio::Secret::new, twilio::PublicUrl::parse(url)?, settings)
        }
        Scheme::Hmac => {
            let missing = SecretError::Setting("the hmac scheme needs a layout: at least the signature's header");
            let layout = settings.layout.clone().ok_or(missing)?;
            make(secrets, plain::Secret::new, layout.checked()?, settings)
        }
        Scheme::Sns => Err(SecretError::Setting("sns has topics and certificates, not secrets: see sns::Verifier")),
    }
}

fn make<K: Key + 'static>(
    secrets: &[(&str, Option<UnixSeconds>)],
    parse: impl Fn(&str) -> Result<K, SecretError>,
    its: K::Settings,
    settings: &Settings,
) -> Result<Box<dyn Verify>, SecretError> {
    let live = |(secret, until): &(&str, Option<UnixSeconds>)| Ok(Live { key: parse(secret)?, until: *until });
    let keys: Vec<Live<K>> = secrets.iter().map(live).collect::<Result<_, SecretError>>()?;
    Ok(Box::new(Verifier::with(keys, its)?.within(settings.tolerance)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_header_cannot_hold_both_signature_and_time() {
        for name in ["x-sig", "X-SIG"] {
            let layout = plain::Layout { timestamp_header: Some(name.into()), ..plain::Layout::new("x-sig") };
            let settings = Settings { layout: Some(layout), ..Settings::default() };
            let refused = verifier(Scheme::Hmac, &["0123456789abcdef"], &settings).unwrap_err();
            assert!(matches!(refused, SecretError::Setting(text) if text.contains("both")));
        }
    }

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
            let ends = (secret, Some(UnixSeconds(0)));
            assert!(verifier_in_rotation(scheme, &[(secret, None), ends], &settings).is_ok(), "{scheme}");
            assert!(matches!(verifier_in_rotation(scheme, &[ends], &settings), Err(SecretError::Setting(_))));
            assert_eq!(scheme.as_str().parse(), Ok(scheme));
        }
        for scheme in [Scheme::Twilio, Scheme::Hmac, Scheme::Sns] {
            assert!(matches!(verifier(scheme, &[secret], &Settings::default()), Err(SecretError::Setting(_))));
        }
    }
}
