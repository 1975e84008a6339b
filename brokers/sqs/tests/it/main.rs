//! What the suites do not know: what is special about SQS and SNS.

#[path = "../support/mod.rs"]
mod support;

mod answers;
mod faults;
mod messages;
mod receiving;
mod tls;
