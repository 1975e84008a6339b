//! What the suites do not know: what is special about MQTT.

#[path = "../support/mod.rs"]
mod support;

mod connections;
mod hostile;
mod receiving;
mod sending;
