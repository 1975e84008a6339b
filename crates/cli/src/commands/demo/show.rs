//! What the demo shows: live bars at a terminal, plain lines in a pipe, and the table of the proof.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use postbox_server::text::grouped;

use super::proof::Proof;
use crate::failure::Failure;
use crate::output;

/// How far everything is, for the display only.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) committed: u64,
    pub(super) rolled_back: u64,
    pub(super) delivered: u64,
    pub(super) applied: u64,
    pub(super) failed: u64,
}

/// Colours, when somebody sees them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Paint(bool);

impl Paint {
    pub(super) fn new() -> Self {
        // https://no-color.org
        Self(std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()))
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub(super) fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    pub(super) fn dim(self, text: &str) -> String {
        self.with("2", text)
    }

    pub(super) fn good(self, text: &str) -> String {
        self.with("32", text)
    }

    pub(super) fn bad(self, text: &str) -> String {
        self.with("1;31", text)
    }

    pub(super) fn warm(self, text: &str) -> String {
        self.with("33", text)
    }
}

struct Bars {
    all: MultiProgress,
    committed: ProgressBar,
    delivered: ProgressBar,
    applied: ProgressBar,
}

/// The live display.
pub(super) struct Show {
    began: Instant,
    bars: Option<Bars>,
    paint: Paint,
    last_line: Option<Instant>,
}

/// In a pipe, one line of progress in so long a time.
const LINE_EVERY: Duration = Duration::from_secs(1);

impl Show {
    pub(super) fn new(total: u64, paint: Paint) -> Self {
        let bars = output::is_terminal().then(|| {
            let all = MultiProgress::new();
            let bar = |name: &'static str, colour: &str| {
                let style = format!("  {{prefix:<10}} {{bar:40.{colour}/238}} {{pos:>7}}  {{msg}}");
                let style = ProgressStyle::with_template(&style).unwrap_or_else(|_| ProgressStyle::default_bar());
                let bar = all.add(ProgressBar::new(total).with_style(style.progress_chars("━╸─")));
                bar.set_prefix(name);
                bar
            };
            let (committed, delivered, applied) =
                (bar("committed", "cyan"), bar("delivered", "blue"), bar("applied", "green"));
            Bars { all, committed, delivered, applied }
        });
        Self { began: Instant::now(), bars, paint, last_line: None }
    }

    /// Something happened.
    pub(super) fn say(&self, text: &str) -> Result<(), Failure> {
        let line = format!("  {} {text}", self.paint.dim(&format!("{:5.1}s", self.began.elapsed().as_secs_f64())));
        match &self.bars {
            Some(bars) => bars.all.println(line).map_err(Failure::from),
            None => output::print(&(line + "\n")),
        }
    }

    /// How far it is.
    pub(super) fn update(&mut self, counts: Counts) -> Result<(), Failure> {
        let Some(bars) = &self.bars else {
            if self.last_line.is_some_and(|last| last.elapsed() < LINE_EVERY) {
                return Ok(());
            }
            self.last_line = Some(Instant::now());
            return self.say(&format!(
                "committed {:>7}   rolled back {:>5}   delivered {:>7}   applied {:>7}",
                grouped(counts.committed),
                grouped(counts.rolled_back),
                grouped(counts.delivered),
                grouped(counts.applied)
            ));
        };
        bars.committed.set_position(counts.committed);
        bars.committed.set_message(format!("{} rolled back on purpose", grouped(counts.rolled_back)));
        bars.delivered.set_position(counts.delivered);
        bars.delivered.set_message(format!("{} requests failed on the way", grouped(counts.failed)));
        bars.applied.set_position(counts.applied);
        Ok(())
    }

    /// The last state stays on the screen.
    pub(super) fn finish(&self) -> Duration {
        if let Some(bars) = &self.bars {
            for bar in [&bars.committed, &bars.delivered, &bars.applied] {
                bar.abandon();
            }
        }
        self.began.elapsed()
    }
}

/// The table of the proof.
pub(super) fn proof(proof: &Proof, paint: Paint) -> String {
    let mut text = format!("\n  {}\n", paint.bold("The proof"));
    text += &paint
        .dim("  counted by SQL from both databases and the shop's own notes, never from what the code believes\n");
    text.push('\n');
    let mut facts = vec![
        ("committed", proof.committed, "changes of orders, each with its event in the same transaction"),
        ("rolled back", proof.rolled_back, "transactions, on purpose: no trace of them may ever arrive"),
        ("delivered", proof.delivered, "messages in the receiver's inbox"),
        ("applied", proof.applied, "rows in the receiver's ledger"),
    ];
    for (name, count, meaning) in facts.drain(..) {
        text += &format!("    {name:<14}{:>9}   {}\n", grouped(count), paint.dim(meaning));
    }
    text.push('\n');
    let promises = [
        ("lost", proof.lost, "committed, but never applied"),
        ("phantom", proof.phantom, "applied, but never committed"),
        ("applied twice", proof.twice, "events with more than one row"),
        ("out of order", proof.disordered, "changes applied before an earlier one of their order"),
        ("unaccounted", proof.unnoted, "orders whose row and notes differ"),
    ];
    for (name, count, meaning) in promises {
        text += &promise(paint, name, &grouped(count), count == 0, meaning);
    }
    let same = proof.cents_shop == proof.cents_ledger;
    let sums = format!("{} in the shop, {} in the ledger", money(proof.cents_shop), money(proof.cents_ledger));
    text += &promise(paint, "money missing", &money(proof.cents_shop - proof.cents_ledger), same, &sums);
    text
}

fn promise(paint: Paint, name: &str, value: &str, kept: bool, meaning: &str) -> String {
    let (mark, value) = match kept {
        true => (paint.good("✓"), paint.good(&format!("{value:>9}"))),
        false => (paint.bad("✗"), paint.bad(&format!("{value:>9}"))),
    };
    format!("  {mark} {name:<14}{value}   {}\n", paint.dim(meaning))
}

fn money(cents: i64) -> String {
    let sign = if cents < 0 { "-" } else { "" };
    format!("{sign}{}.{:02}", grouped(cents.unsigned_abs() / 100), cents.unsigned_abs() % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn money_is_readable() {
        assert_eq!([money(0), money(5), money(-123_456)], ["0.00", "0.05", "-1,234.56"]);
    }
}
