//! TLS for outgoing requests: rustls with ring, named explicitly, so that no process-wide provider
//! is needed.
//!
//! The trust roots are the operating system's, through the platform verifier, which honours
//! `SSL_CERT_FILE` on Linux, plus a file of your own for a private authority. They are read only if
//! the URL is `https`, so that a plain target works in a container without any certificates.

use std::path::Path;
use std::sync::Arc;

use postbox_core::{Error, Result};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::Verifier;
use tracing::warn;

use crate::config::ClientCert;

/// Returns the client's TLS settings for a target.
pub(crate) fn client_config(
    https: bool,
    ca_file: Option<&Path>,
    client_cert: Option<&ClientCert>,
) -> Result<ClientConfig> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::invalid("configure", "tls_invalid", error.to_string()))?;
    if !https {
        // Never used: the URL is plain and redirects are not followed. Without roots it would trust
        // nobody.
        return Ok(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth());
    }
    let extra = ca_file.map(|path| read_certificates("ca_file", path)).transpose()?.unwrap_or_default();
    let verifier = Verifier::new_with_extra_roots(extra, provider).map_err(|error| {
        Error::invalid(
            "configure",
            "tls_roots_missing",
            "no trusted certificates: install the system's ca-certificates, set SSL_CERT_FILE, or give a ca_file",
        )
        .with_source(error)
    })?;
    let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match client_cert {
        None => builder.with_no_client_auth(),
        Some(ClientCert { cert_file, key_file }) => {
            let certificates = read_certificates("client_cert", cert_file)?;
            builder.with_client_auth_cert(certificates, read_key(key_file)?).map_err(|error| {
                let text = format!(
                    "client_cert {} and client_key {} do not fit each other: {error}",
                    cert_file.display(),
                    key_file.display()
                );
                Error::invalid("configure", "client_cert_invalid", text)
            })?
        }
    };
    // Not HTTP/2: a request that times out would leave its connection in use, and every later one
    // would go to the same peer that does not answer.
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

fn read_certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let code = if key == "ca_file" { "ca_file_invalid" } else { "client_cert_invalid" };
    let unusable =
        |why: String| Error::invalid("configure", code, format!("{key} {} is unusable: {why}", path.display()));
    let certificates = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>)
        .map_err(|error| unusable(error.to_string()))?;
    if certificates.is_empty() {
        return Err(unusable("it holds no certificate".into()));
    }
    Ok(certificates)
}

/// Reads the key of a client certificate. Warns if other users can read it: whoever has it can pose
/// as us to every target.
fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    let shown = path.display();
    #[cfg(unix)]
    if let Ok(file) = std::fs::metadata(path) {
        use std::os::unix::fs::PermissionsExt;
        let mode = file.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            warn!(file = %shown, mode = format!("{mode:o}"), cure = "run: chmod 600 FILE", "client key readable by others");
        }
    }
    PrivateKeyDer::from_pem_file(path).map_err(|error| {
        let text = format!(
            "client_key {shown} is unusable: {error}; it must hold a private key in PEM form, without a passphrase, that this user may read"
        );
        Error::invalid("configure", "client_cert_invalid", text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_target_needs_no_certificates_and_no_provider() {
        assert!(client_config(false, None, None).is_ok());
        assert!(rustls::crypto::CryptoProvider::get_default().is_none());
    }

    #[test]
    fn an_unusable_ca_file_is_named() {
        for path in ["/nonexistent/ca.pem", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")] {
            let error = client_config(true, Some(Path::new(path)), None).expect_err("unusable");
            assert_eq!(error.code(), "ca_file_invalid");
            assert!(error.message().contains(path));
        }
    }
}
