//! Writes whole files: a full disk leaves no part of one.

use std::fs::Permissions;
use std::io::{Result, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, fchown};
use std::path::Path;

/// Writes a file beside `path` and then renames it. A file that is there is replaced whole, or
/// without `replace` the error is `AlreadyExists`. A check first would overwrite a file that
/// appears in between.
pub(crate) fn write(path: &Path, text: &str, mode: u32, replace: bool) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut file = tempfile::Builder::new().permissions(Permissions::from_mode(mode)).tempfile_in(folder)?;
    if replace && let Ok(old) = std::fs::metadata(path) {
        // Under sudo, the new file would belong to root, and the service could not read it.
        _ = fchown(file.as_file(), Some(old.uid()), Some(old.gid()));
    }
    file.write_all(text.as_bytes())?;
    // Some file systems report only here that they are full.
    file.as_file().sync_all()?;
    let named = if replace { file.persist(path) } else { file.persist_noclobber(path) };
    named.map(drop).map_err(|refused| refused.error)
}
