//! `postbox init`: writes the commented configuration.

use std::fs::{OpenOptions, Permissions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::PathBuf;

use postbox_server::STORE_VARIABLE;

use crate::args::Global;
use crate::failure::Failure;
use crate::output;

/// The line of the store in the text.
const STORE_DEFAULT: &str = "url = \"sqlite:postbox.db\"";

pub(super) fn run(global: &Global, force: bool) -> Result<(), Failure> {
    let path = global.config.clone().unwrap_or_else(|| PathBuf::from(postbox_server::FILE_DEFAULT));
    let shown = path.display();
    // `create_new` rather than a check first: a file that appears in between is not overwritten.
    let mut options = OpenOptions::new();
    // Readable by the owner only, because secrets may be written into it.
    options.write(true).mode(0o600);
    let opened = match force {
        true => options.create(true).truncate(true).open(&path),
        false => options.create_new(true).open(&path),
    };
    let mut file = opened.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => Failure::failed(format!("{shown} exists already; overwrite it with --force")),
        _ => Failure::failed(format!("{shown} cannot be written: {error}")),
    })?;
    // A file that was there keeps its mode.
    file.set_permissions(Permissions::from_mode(0o600))
        .map_err(|error| Failure::failed(format!("{shown} cannot be made readable by its owner only: {error}")))?;
    let mut text = postbox_server::default_toml();
    if std::env::var_os(STORE_VARIABLE).is_some_and(|value| !value.is_empty()) {
        // It overrides the file. Where it is not set, the file must not name another store.
        text = text.replacen(STORE_DEFAULT, &format!("url = \"env:{STORE_VARIABLE}\""), 1);
    }
    file.write_all(text.as_bytes()).map_err(|error| Failure::failed(format!("{shown} cannot be written: {error}")))?;
    output::line(&format!("wrote {shown}"))?;
    output::line("next: edit it, `postbox check-config`, `postbox migrate up`, `postbox run`")
}
