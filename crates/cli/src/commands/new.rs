//! `postbox new service NAME`: writes a starter service.
//!
//! `examples/service` links to these files, so that they are built, linted and run with the
//! workspace.

use std::path::Path;

use super::migration_files::write_new;
use crate::failure::Failure;
use crate::output;

/// The files of the service. `shop-service` stands for its name, `shop_service` for its Rust crate
/// name.
const SERVICE: [(&str, &str); 9] = [
    (".dockerignore", include_str!("new/service/dockerignore")),
    (".gitignore", include_str!("new/service/gitignore")),
    // Not named Cargo.toml: cargo would take the folder for a package of its own and leave it out
    // of ours.
    ("Cargo.toml", include_str!("new/service/manifest.toml")),
    ("Dockerfile", include_str!("new/service/Dockerfile")),
    ("README.md", include_str!("new/service/README.md")),
    ("src/lib.rs", include_str!("new/service/src/lib.rs")),
    ("src/main.rs", include_str!("new/service/src/main.rs")),
    ("src/schema.sql", include_str!("new/service/src/schema.sql")),
    ("tests/service.rs", include_str!("new/service/tests/service.rs")),
];

/// The longest name that crates.io allows.
const NAME_CHARS_MAX: usize = 64;

/// Rust keywords, names that cargo reserves, and crates that the service uses.
const NAMES_TAKEN: &str = "\
    abstract alloc anyhow as async await axum become box break build const continue core crate \
    deps do dyn else enum examples extern false final fn for gen if impl in incremental let \
    loop macro match mod move mut override postbox priv proc-macro proc_macro pub ref return \
    self serde sqlx static std struct super test tokio tracing tracing-subscriber tracing_subscriber trait true \
    try type typeof unsafe unsized use virtual where while yield";

/// Checks a name that must be valid for a package, a crate and a program.
pub(crate) fn crate_name(text: &str) -> Result<String, String> {
    let is_right = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    if !text.starts_with(|c: char| c.is_ascii_lowercase()) || !text.chars().all(is_right) {
        return Err("a crate's name begins with a letter from a to z; then come such letters, digits, - and _".into());
    }
    if text.len() > NAME_CHARS_MAX {
        return Err(format!("a crate's name has at most {NAME_CHARS_MAX} characters"));
    }
    if NAMES_TAKEN.split(' ').any(|taken| taken == text) {
        return Err("that name is taken, by Rust, by cargo or by a crate that the service uses; choose another".into());
    }
    Ok(text.to_owned())
}

pub(super) fn service(name: &str) -> Result<(), Failure> {
    let folder = Path::new(name);
    let is_empty = match std::fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) => match error.kind() {
            std::io::ErrorKind::NotFound => true,
            _ => {
                return Err(Failure::failed(format!("{name} exists already, and cannot be used as a folder: {error}")));
            }
        },
    };
    if !is_empty {
        return Err(Failure::failed(format!("the folder {name} exists already and is not empty; choose another name")));
    }
    for (file, text) in SERVICE {
        // A crate's name has no "-", so the second replacement leaves alone what the first wrote.
        let text = text.replace("shop_service", &name.replace('-', "_")).replace("shop-service", name);
        write_new(&folder.join(file), &text)?;
        output::line(&format!("wrote {name}/{file}"));
    }
    output::line(&format!("next: cd {name}, cargo test; README.md says how to run it"));
    Ok(())
}
