//! The figures of one side, and how they are printed.

use std::time::Duration;

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Figure {
    /// Events, commits or requests.
    pub(crate) count: usize,
    pub(crate) seconds: f64,
    /// Of the measured process and its database server.
    pub(crate) processor_seconds: f64,
    /// Bytes of write-ahead log; on SQLite all bytes written, log and checkpoints.
    pub(crate) bytes: f64,
    pub(crate) memory_mib: f64,
}

impl Figure {
    pub(crate) fn per_second(self) -> f64 {
        self.count as f64 / self.seconds.max(f64::EPSILON)
    }

    /// Adds a second run that followed this one.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            seconds: self.seconds + other.seconds,
            processor_seconds: self.processor_seconds + other.processor_seconds,
            bytes: self.bytes + other.bytes,
            memory_mib: self.memory_mib.max(other.memory_mib),
        }
    }

    /// `412,345/s`.
    pub(crate) fn rate(self) -> String {
        format!("{}/s", thousands(self.per_second()))
    }

    /// Our rate as a share of the limit's: `83 %`.
    pub(crate) fn ratio(self, limit: Self) -> String {
        percent(self.per_second(), limit.per_second())
    }

    /// Processor time per event, in microseconds.
    pub(crate) fn micros(self) -> f64 {
        1e6 * self.processor_seconds / self.count.max(1) as f64
    }

    pub(crate) fn bytes_each(self) -> f64 {
        self.bytes / self.count.max(1) as f64
    }
}

/// `83 %`.
pub(crate) fn percent(part: f64, whole: f64) -> String {
    format!("{:.0} %", 100.0 * part / whole)
}

/// `1,234,567`.
pub(crate) fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1.7 ms`.
pub(crate) fn milliseconds(duration: Duration) -> String {
    let milliseconds = duration.as_secs_f64() * 1_000.0;
    if milliseconds < 10.0 { format!("{milliseconds:.2} ms") } else { format!("{milliseconds:.0} ms") }
}

/// Rows of text under a heading, printed as an aligned table.
pub(crate) struct Table {
    title: String,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(title: impl Into<String>, columns: &[&str]) -> Self {
        Self { title: title.into(), rows: vec![columns.iter().map(|column| (*column).to_owned()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub(crate) fn print(&self) {
        println!("\n{}", self.title);
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.rows[0].len()).map(width).collect();
        for (n, row) in self.rows.iter().enumerate() {
            let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
                0 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
            println!("  {}", cells.collect::<Vec<_>>().join("  "));
            if n == 0 {
                println!("  {}", widths.iter().map(|width| "─".repeat(*width)).collect::<Vec<_>>().join("  "));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_grouped() {
        assert_eq!(thousands(0.4), "0");
        assert_eq!(thousands(999.0), "999");
        assert_eq!(thousands(1_234_567.0), "1,234,567");
    }
}
