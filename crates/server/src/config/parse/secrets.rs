//! Keys of sources and sinks, of which old ones may carry the end of their overlap.

use jiff::Timestamp;

use super::super::model::LiveSecret;
use super::super::reader::{At, Entry, Section};
use crate::secret::Secret;

/// `secret = "…"` and `secrets = ["…", { secret = "…", until = "…" }]`.
pub(super) fn read_secrets(section: &Section<'_, '_>) -> Vec<LiveSecret> {
    let forever = |at: At<String>| {
        let secret = read_secret(section, &at)?;
        Some(LiveSecret { secret, until: None })
    };
    let mut secrets: Vec<LiveSecret> = section.string("secret").and_then(forever).into_iter().collect();
    for entry in section.entries("secrets").unwrap_or_default() {
        secrets.extend(match entry {
            Entry::Text(at) => forever(at),
            Entry::Table(table) => read_retiring(table),
        });
    }
    secrets
}

/// A key, unless there is nothing in it: whoever guesses that has guessed the key.
fn read_secret(section: &Section<'_, '_>, at: &At<String>) -> Option<Secret> {
    let secret = section.reader.secret(&section.path, at, false)?;
    // What is unset for a command that does not need it is empty.
    let unset = secret.expose().is_empty() && !at.value.is_empty();
    if !unset && secret.expose().trim().is_empty() {
        let text =
            format!("{} has a secret that is empty or blank; write \"env:NAME\", with the key in NAME", section.path);
        section.reader.fault(at.line, text);
        return None;
    }
    Some(secret)
}

fn read_retiring(table: Section<'_, '_>) -> Option<LiveSecret> {
    let secret = table.string("secret").and_then(|at| read_secret(&table, &at));
    if !table.has("secret") {
        table
            .fault("secret", format!("{} has no secret; write {{ secret = \"env:NAME\", until = \"…\" }}", table.path));
    }
    let until = table.parsed("until", |text| {
        text.parse::<Timestamp>()
            .map_err(|_| format!("{text:?} is no time; write it in UTC, e.g. \"2026-12-01T00:00:00Z\""))
    });
    table.finish();
    Some(LiveSecret { secret: secret?, until })
}
