//! The binary from the outside, on SQLite and on Postgres.

mod attacks;
mod blocked_output;
mod bulk_changes;
mod bus;
mod commands;
mod connect;
mod dead_letters;
mod deliveries;
mod demo;
mod diagnosis;
mod endpoint;
mod env;
mod faults;
mod hostile;
mod inbox;
mod kafka;
mod nats;
mod outages;
mod privacy;
mod psql;
mod rabbitmq;
mod redis;
mod run;
mod sender;
mod sqs;
mod unreadable;
