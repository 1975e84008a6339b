//! What the demo shows while it runs: live bars at a terminal, plain lines in a pipe.

use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use postbox_server::text::grouped;

use crate::failure::Failure;
use crate::output;

/// In a pipe, one line of progress in so long a time.
const LINE_EVERY: Duration = Duration::from_secs(1);

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
        Self(output::is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()))
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

/// The live display.
pub(super) struct Show {
    pub(super) began: Instant,
    pub(super) paint: Paint,
    /// At a terminal: committed, delivered, applied.
    bars: Option<(MultiProgress, [ProgressBar; 3])>,
    last_line: Option<Instant>,
}

impl Show {
    pub(super) fn new(total: u64, paint: Paint) -> Self {
        let bars = output::is_terminal().then(|| {
            let all = MultiProgress::new();
            let bars = [("committed", "cyan"), ("delivered", "blue"), ("applied", "green")].map(|(name, colour)| {
                let style = format!("  {{prefix:<10}} {{bar:40.{colour}/238}} {{pos:>7}}  {{msg}}");
                let style = ProgressStyle::with_template(&style).unwrap_or_else(|_| ProgressStyle::default_bar());
                all.add(ProgressBar::new(total).with_style(style.progress_chars("━╸─")).with_prefix(name))
            });
            (all, bars)
        });
        Self { began: Instant::now(), paint, bars, last_line: None }
    }

    /// Something happened.
    pub(super) fn say(&self, text: &str) -> Result<(), Failure> {
        let line = format!("  {} {text}", self.paint.dim(&format!("{:5.1}s", self.began.elapsed().as_secs_f64())));
        match &self.bars {
            Some((all, _)) => all.println(line).map_err(Failure::from),
            None => output::print(&(line + "\n")),
        }
    }

    /// How far it is.
    pub(super) fn update(&mut self, counts: Counts) -> Result<(), Failure> {
        let Counts { committed, rolled_back, delivered, applied, failed } = counts;
        let Some((_, bars)) = &self.bars else {
            if self.last_line.is_some_and(|last| last.elapsed() < LINE_EVERY) {
                return Ok(());
            }
            self.last_line = Some(Instant::now());
            let [committed, rolled_back, delivered, applied] =
                [committed, rolled_back, delivered, applied].map(grouped);
            return self.say(&format!(
                "committed {committed:>7}   rolled back {rolled_back:>5}   delivered {delivered:>7}   applied {applied:>7}"
            ));
        };
        for (bar, count) in bars.iter().zip([committed, delivered, applied]) {
            bar.set_position(count);
        }
        bars[0].set_message(format!("{} rolled back on purpose", grouped(rolled_back)));
        bars[1].set_message(format!("{} requests failed on the way", grouped(failed)));
        Ok(())
    }

    /// The last state stays on the screen.
    pub(super) fn finish(&self) -> Duration {
        self.bars.iter().flat_map(|(_, bars)| bars).for_each(ProgressBar::abandon);
        self.began.elapsed()
    }
}
