//! `postbox init`: writes the commented configuration.

use std::io::ErrorKind;
use std::path::PathBuf;

use postbox_server::STORE_VARIABLE;

use crate::args::Global;
use crate::failure::Failure;
use crate::{files, output};

/// The line of the store in the text.
const STORE_DEFAULT: &str = "url = \"sqlite:postbox.db\"";

pub(super) fn run(global: &Global, force: bool) -> Result<(), Failure> {
    let path = global.config.clone().unwrap_or_else(|| PathBuf::from(postbox_server::FILE_DEFAULT));
    let shown = path.display();
    let mut text = postbox_server::default_toml();
    if std::env::var_os(STORE_VARIABLE).is_some_and(|value| !value.is_empty()) {
        // It overrides the file. Where it is not set, the file must not name another store.
        text = text.replacen(STORE_DEFAULT, &format!("url = \"env:{STORE_VARIABLE}\""), 1);
    }
    // Where a link points to, so that the link stays.
    let target = path.canonicalize().unwrap_or_else(|_| path.clone());
    // Readable by the owner only, because secrets may be written into it.
    files::write(&target, &text, 0o600, force).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => Failure::failed(format!("{shown} exists already; overwrite it with --force")),
        _ => Failure::failed(format!("{shown} cannot be written: {error}")),
    })?;
    output::line(&format!("wrote {shown}"));
    output::line("next: edit it, `postbox check-config`, `postbox migrate up`, `postbox run`");
    Ok(())
}
