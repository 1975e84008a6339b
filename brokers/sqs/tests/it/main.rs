//! Tests of what is specific to SQS and SNS.

#[path = "../support/mod.rs"]
mod support;

mod answers;
mod faults;
mod messages;
mod receiving;
mod tls;
