//! Benchmarks: `cargo xtask bench drain | latency | append | ingress | outbound | sinks | sources |
//! replicas | retention | status`. Each prints our figure, its limit, and the ratio of the two,
//! from one run.
#![allow(clippy::print_stdout, reason = "a command for people")]

mod append;
mod bed;
mod broker;
mod child;
mod drain;
mod figure;
mod ingress;
mod latency;
mod machine;
mod outbound;
mod peer;
mod plain;
mod replicas;
mod retention;
mod sinks;
mod sources;
mod status;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// As in the binary. The clients and peers of this process have it too.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(name = "cargo xtask bench", about = "Benchmarks of Postbox, each against its limit in the same run")]
struct Arguments {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// A backlog to a sink that does nothing, against reading the same rows with one paged SELECT.
    Drain(drain::Options),
    /// From the commit to the delivery, at steady rates and with writers that saturate the machine.
    Latency(latency::Options),
    /// Events in the caller's transaction, against the same INSERT into a bare table.
    Append(append::Options),
    /// Webhooks in, verified and stored durably, against an axum server that only inserts the row.
    Ingress(ingress::Options),
    /// Events out over HTTP, against the same client posting from memory; and with another target
    /// that hangs.
    Outbound(outbound::Options),
    /// Two replicas against one, with two lanes and a sink that takes 1 ms.
    Replicas(replicas::Options),
    /// Events out to brokers, against the broker's own client publishing from memory; and from the
    /// commit to the broker's answer.
    Sinks(sinks::Options),
    /// Messages of brokers into the inbox, against their client that stores nothing.
    Sources(sources::Options),
    /// Old events deleted, at two sizes of the log, while others append.
    Retention(retention::Options),
    /// A scrape of `/metrics`, and `postbox doctor`, at two sizes of the log.
    Status(status::Options),
    /// The other side of HTTP.
    #[command(hide = true)]
    Peer(peer::Job),
    /// A broker for `sinks`.
    #[command(hide = true)]
    Kafka,
    /// One measured process of the above.
    #[command(hide = true)]
    Child(child::Job),
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Arguments::parse().bench).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(bench: Bench) -> anyhow::Result<()> {
    if !matches!(bench, Bench::Child(_) | Bench::Kafka | Bench::Peer(_)) {
        println!("{}", machine::describe());
    }
    match bench {
        Bench::Drain(options) => drain::run(&options).await,
        Bench::Latency(options) => latency::run(&options).await,
        Bench::Append(options) => append::run(&options).await,
        Bench::Ingress(options) => ingress::run(&options).await,
        Bench::Outbound(options) => outbound::run(&options).await,
        Bench::Replicas(options) => replicas::run(&options).await,
        Bench::Sinks(options) => sinks::run(&options).await,
        Bench::Sources(options) => sources::run(&options).await,
        Bench::Retention(options) => retention::run(&options).await,
        Bench::Status(options) => status::run(&options).await,
        Bench::Kafka => broker::kafka::serve().await,
        Bench::Peer(job) => job.run().await,
        Bench::Child(job) => job.run().await,
    }
}
