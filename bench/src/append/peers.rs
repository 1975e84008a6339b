//! One event per transaction, by Postbox and by other libraries.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::{Options, ROUNDS};
use crate::bed::{Bed, Place};
use crate::figure::{Figure, Table, percent, thousands};
use crate::machine;

pub(super) async fn run(options: &Options) -> anyhow::Result<()> {
    let bed = Bed::postgres().await?;
    let connections = options.writers.iter().max().context("no number of writers")?;
    let (mut peers, sides) = Peers::start(&bed.store, *connections).await?;
    let title = "append: one event of 300 bytes in a sqlx transaction of its own, Postgres 15, fsync on";
    let columns = ["writers", "", "rate", "of ours", "processor/event", "of ours", "WAL B/event"];
    let mut table = Table::new(title, &columns);
    for writers in &options.writers {
        let mut figures = vec![Figure::default(); sides.len()];
        for _ in 0..ROUNDS {
            for (side, figure) in sides.iter().zip(&mut figures) {
                *figure = figure.plus(peers.turn(&bed, side, *writers, options.round()).await?);
            }
        }
        // Ours is the first.
        let ours = figures[0];
        for (side, figure) in sides.iter().zip(&figures) {
            let speed = [figure.rate(), figure.ratio(ours)];
            let work = [format!("{:.0} µs", figure.micros()), percent(figure.micros(), ours.micros())];
            let row = [writers.to_string(), side.clone()].into_iter().chain(speed).chain(work);
            table.row(row.chain([thousands(figure.bytes_each())]));
        }
    }
    table.print();
    println!("  processor: the program's and its server's; what is not equal: bench/peers/README.md");
    Ok(())
}

/// The program that inserts for all sides. The other libraries have their own lock file, and are
/// built only for this benchmark.
struct Peers {
    program: Child,
    asks: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Peers {
    /// Starts the program; returns it and the names of the sides.
    async fn start(store: &str, connections: usize) -> anyhow::Result<(Self, Vec<String>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(["run", "--quiet", "--release", "--locked", "--manifest-path"]).arg(folder.join("Cargo.toml"));
        command.arg("--target-dir").arg(folder.join("../../target/peers"));
        command.args(["--", store, &connections.to_string()]);
        let mut program = command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let asks = program.stdin.take().context("no input")?;
        let answers = BufReader::new(program.stdout.take().context("no output")?).lines();
        let mut peers = Self { program, asks, answers };
        let sides = peers.answer().await?.split_whitespace().map(str::to_owned).collect();
        Ok((peers, sides))
    }

    async fn answer(&mut self) -> anyhow::Result<String> {
        self.answers.next_line().await?.context("bench/peers ended")
    }

    async fn turn(&mut self, bed: &Bed, side: &str, writers: usize, time: Duration) -> anyhow::Result<Figure> {
        if let Place::Postgres(client, _) = &bed.place {
            client.batch_execute("CHECKPOINT").await?;
        }
        let pid = self.program.id().context("bench/peers ended")?;
        let used = machine::processor_seconds_of_family(pid)?;
        let ask = format!("{side} {writers} {}\n", time.as_millis());
        let work = async {
            self.asks.write_all(ask.as_bytes()).await?;
            Ok(Figure { count: self.answer().await?.parse()?, ..Figure::default() })
        };
        let figure = bed.measure(work).await?;
        ensure!(figure.count > 0, "{side} inserted nothing");
        let used = machine::processor_seconds_of_family(pid)? - used;
        Ok(Figure { processor_seconds: figure.processor_seconds + used, ..figure })
    }
}
