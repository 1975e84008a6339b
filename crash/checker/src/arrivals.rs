//! Arrivals at a sink, in the order of its file.

use std::path::Path;

use anyhow::Context as _;
use serde::Deserialize;

/// One arrival.
#[derive(Debug)]
pub struct Arrival {
    /// Where its line begins in the file. It gives the order of arrival, and can be compared with
    /// the positions in faults.
    pub(crate) place: u64,
    /// The endpoint's answer; 0: it never answered.
    pub(crate) status: u16,
    /// The body; `None` if it is not one of ours.
    pub(crate) body: Option<Body>,
}

/// A payload, as every writer writes it.
#[derive(Debug, Deserialize)]
pub struct Body {
    /// The transaction.
    pub tx: String,
    /// The event's number within it.
    pub n: u32,
    /// Its key.
    pub key: String,
    /// Its number within the key.
    pub v: i64,
    /// Padding whose length depends on `n`, to detect truncated payloads.
    #[serde(default)]
    pub pad: String,
}

impl Body {
    /// The padding that belongs to an event.
    pub fn pad(n: u32) -> String {
        "x".repeat(20 + (n as usize * 37) % 160)
    }
}

#[derive(Deserialize)]
struct FileLine {
    payload: Option<Body>,
}

impl Arrival {
    /// Reads a file of arrivals; a missing file is empty. `by_file`: written by the file sink,
    /// otherwise by the endpoint.
    pub(crate) fn read(path: &Path, by_file: bool) -> anyhow::Result<Vec<Self>> {
        if !path.is_file() {
            return Ok(Vec::new());
        }
        let text = std::fs::read(path).with_context(|| path.display().to_string())?;
        let mut arrivals = Vec::new();
        let mut place = 0;
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            let end = place + line.len() as u64;
            // A line without an end, or one that was ended by the next writer, is half a write: it
            // never counted as delivered.
            let line = line.strip_suffix(b"\n").unwrap_or_default();
            if by_file {
                if let Ok(line) = serde_json::from_slice::<FileLine>(line) {
                    arrivals.push(Self { place, status: 200, body: line.payload });
                }
            } else if line.len() > 4 {
                let status = std::str::from_utf8(&line[..3])?.parse().with_context(|| format!("at {place}"))?;
                arrivals.push(Self { place, status, body: serde_json::from_slice(&line[4..]).ok() });
            }
            place = end;
        }
        Ok(arrivals)
    }

    /// Whether the destination accepted it.
    pub(crate) fn is_accepted(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Whether the destination rejected it for good.
    pub(crate) fn is_refused(&self) -> bool {
        self.status == 422
    }
}
