//! Real servers for tests, stopped when the tests end: Postgres 15 and 18, pgbouncer, NATS 2.9 and
//! 2.15, RabbitMQ 3.10, Redis 7 and Valkey 9, Mosquitto 2.0, Tansu (Kafka protocol), SQS and SNS by
//! moto, and Prometheus.
//!
//! | call | cost | for |
//! |---|---|---|
//! | [`Postgres::shared`] | ~1 s for the first test of a run, then ~5 ms | nearly every test: one server for all processes of the run |
//! | [`Postgres::fresh_database`] | ~50 ms | an empty database for one test on that server |
//! | [`Postgres::prepared_database`] | ~50 ms | the same, with what every test of a program needs in it |
//! | [`PrivatePostgres::launch`] | ~1 s | tests that stop, kill or configure their server |
//! | [`PgBouncer::start`] | ~50 ms | a transaction-mode pooler in front of either |
//! | [`PrivateRedis::launch`] | ~80 ms | every test with Redis or Valkey |
//! | [`PrivateSentinel::launch`] | ~80 ms | tests of a failover |
//! | [`Sqs::shared`] | ~1 s for the first test of a run | SQS and SNS for all tests that leave them alone |
//! | [`PrivateSqs::launch`] | ~1 s | tests that stop their SQS, or count on its names |
//! | [`PrivateNats::launch`], [`PrivateNats::launch_cluster`] | ~50 ms | a NATS server with JetStream; three of them |
//! | [`PrivateMqtt::launch`] | ~50 ms | a server with MQTT 5 |
//! | [`PrivatePrometheus::launch`] | ~1 s | the result of scraping `/metrics` |
//! | [`PrivateKafka::launch`] | ~50 ms | a server with the Kafka protocol |
//! | [`Rabbitmq::shared`], [`Rabbitmq::shared_with`] | ~5 s for the first test of a run | a RabbitMQ for all tests that leave it alone |
//! | [`PrivateRabbitmq::launch`] | ~5 s | tests that stop, kill or configure their RabbitMQ |
//!
//! Every server listens on 127.0.0.1 with its own data folder, under an unprivileged user if we are
//! root. Every test is a separate process, so the shared server belongs to none. Each process holds
//! a shared lock on a file, and a guard stops the server and removes its data once nobody has held
//! the lock for some seconds. A private server's guard waits at the end of a pipe, which closes
//! with its owner.
//!
//! `POSTBOX_TEST_PG15` and `POSTBOX_TEST_PG18` (superuser URLs) point the shared fixture at other
//! servers. A missing server fails the test; with `POSTBOX_ALLOW_SKIP=1` the test is skipped
//! instead.

mod install;
mod kafka;
mod mqtt;
mod nats;
mod pgbouncer;
mod ports;
mod postgres;
mod private;
mod private_server;
mod process;
mod prometheus;
mod rabbitmq;
mod redis;
mod shared;
mod sqs;

pub use kafka::{PrivateKafka, Tansu};
pub use mqtt::{Mosquitto, PrivateMqtt};
pub use nats::{Nats, NatsVersion, PrivateNats};
pub use pgbouncer::PgBouncer;
pub use ports::listen_anywhere;
pub use postgres::{Postgres, Version};
pub use private::{PrivatePostgres, Settings};
pub use private_server::{PrivateServer, Program};
pub use prometheus::{PrivatePrometheus, Prometheus, promtool};
pub use rabbitmq::{PrivateRabbitmq, Rabbit, Rabbitmq};
pub use redis::{PrivateRedis, PrivateSentinel, Redis, RedisKind, Sentinel};
pub use sqs::{Moto, PrivateSqs, Sqs};

use std::io::Write as _;

/// Ends the test because a server is missing or does not start, as a failure or a visible skip.
fn unavailable(error: &anyhow::Error) -> ! {
    let missing = error.is::<install::Missing>();
    let allowed = std::env::var_os("POSTBOX_ALLOW_SKIP").is_some_and(|value| value == "1");
    let ci = std::env::var_os("CI").is_some();
    // Ending the process is a skip only if the runner gives each test its own process.
    if missing && allowed && !ci && std::env::var_os("NEXTEST").is_some() {
        let _ = writeln!(std::io::stderr(), "SKIPPED: {error:#}");
        std::process::exit(0);
    }
    panic!("{error:#}");
}
