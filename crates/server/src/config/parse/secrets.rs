//! Keys of sources and sinks, of which old ones may carry the end of their overlap.

use jiff::Timestamp;

use super::super::model::LiveSecret;
use super::super::reader::{At, Entry, Section};

/// `secret = "…"` and `secrets = ["…", { secret = "…", until = "…" }]`.
pub(super) fn read_secrets(section: &Section<'_, '_>) -> Vec<LiveSecret> {
    let forever = |at: At<String>| {
        let secret = section.reader.secret(&section.path, &at, false)?;
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

fn read_retiring(table: Section<'_, '_>) -> Option<LiveSecret> {
    let secret = table.string("secret").and_then(|at| table.reader.secret(&table.path, &at, false));
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
