//! Certificates, in files that a server of another user can read.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

/// Writes a self-signed certificate for `localhost`, and its key.
pub fn self_signed(folder: &Path) -> [PathBuf; 2] {
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(["localhost".to_owned()]).expect("a name");
    let certificate = params.self_signed(&key).expect("signed").pem();
    [write(folder, "cert.pem", &certificate), write(folder, "key.pem", &key.serialize_pem())]
}

/// Writes `ca.pem` of a new authority and, issued by it for `127.0.0.1`, `server.pem` and
/// `client.pem`, with their keys in `server.key` and `client.key`.
pub fn authority(folder: &Path) {
    let key = KeyPair::generate().expect("a key");
    let mut ca = CertificateParams::new(Vec::new()).expect("parameters");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    // With the same name as the others, those would be taken for self-signed.
    ca.distinguished_name.push(DnType::CommonName, "authority");
    write(folder, "ca.pem", &ca.self_signed(&key).expect("signed").pem());
    let issuer = Issuer::new(ca, key);
    for (name, usage) in
        [("server", ExtendedKeyUsagePurpose::ServerAuth), ("client", ExtendedKeyUsagePurpose::ClientAuth)]
    {
        let key = KeyPair::generate().expect("a key");
        let mut of = CertificateParams::new(["127.0.0.1".to_owned()]).expect("parameters");
        of.extended_key_usages = vec![usage];
        write(folder, &format!("{name}.pem"), &of.signed_by(&key, &issuer).expect("signed").pem());
        write(folder, &format!("{name}.key"), &key.serialize_pem());
    }
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).expect("written");
    for (path, mode) in [(folder, 0o755), (path.as_path(), 0o644)] {
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("ours");
    }
    path
}
