//! Tests of what is specific to MQTT.

#[path = "../support/mod.rs"]
mod support;

mod connections;
mod hostile;
mod receiving;
mod sending;
