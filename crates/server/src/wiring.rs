//! From configuration to running parts.

use crate::secret::Secret;

/// Whether a key can sign and verify; the message never repeats it.
pub(crate) fn check_key(secret: &Secret) -> Result<(), String> {
    if secret.expose().len() < 16 {
        return Err("the secret is too short to be a key; make one with 24 random bytes or more".into());
    }
    Ok(())
}
