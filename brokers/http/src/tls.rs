//! TLS for outgoing requests: rustls with ring, named explicitly, so that no process-wide provider is needed.
//!
//! The trust roots are the operating system's (through the platform verifier, which honours `SSL_CERT_FILE` on Linux), plus a file of your own
//! for a private authority. They are read only when the URL is `https`: a plain target works in a container without any certificates.

use std::path::Path;
use std::sync::Arc;

use postbox_core::{Error, Result};
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::Verifier;

/// The client's TLS settings for a target.
pub(crate) fn client_config(https: bool, ca_file: Option<&Path>) -> Result<ClientConfig> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::invalid("configure", "tls_invalid", error.to_string()))?;
    if !https {
        // Never used: the URL is plain and redirects are not followed. With no roots it would trust nobody.
        return Ok(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth());
    }
    let extra = ca_file.map(read_certificates).transpose()?.unwrap_or_default();
    let verifier = Verifier::new_with_extra_roots(extra, provider).map_err(|error| {
        Error::invalid(
            "configure",
            "tls_roots_missing",
            "no trusted certificates: install the system's ca-certificates, set SSL_CERT_FILE, or give a ca_file",
        )
        .with_source(error)
    })?;
    let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = builder.with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let unusable = |why: String| {
        Error::invalid("configure", "ca_file_invalid", format!("ca_file {} is unusable: {why}", path.display()))
    };
    let certificates = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>)
        .map_err(|error| unusable(error.to_string()))?;
    if certificates.is_empty() {
        return Err(unusable("it holds no certificate".into()));
    }
    Ok(certificates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_target_needs_no_certificates_and_no_provider() {
        assert!(client_config(false, None).is_ok());
        assert!(rustls::crypto::CryptoProvider::get_default().is_none());
    }

    #[test]
    fn an_unusable_ca_file_is_named() {
        for path in ["/nonexistent/ca.pem", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")] {
            let error = client_config(true, Some(Path::new(path))).expect_err("unusable");
            assert_eq!(error.code(), "ca_file_invalid");
            assert!(error.message().contains(path));
        }
    }
}
