//! The binary from the outside: what is typed, what is printed, how it ends. On SQLite and on real Postgres.

mod commands;
mod deliveries;
mod demo;
mod endpoint;
mod faults;
mod hostile;
mod inbox;
mod mute;
mod outages;
mod privacy;
mod psql;
mod room;
mod run;
mod sender;
mod steps;
mod strangers;
mod telling;
mod unreadable;
