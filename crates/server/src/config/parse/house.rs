//! `[store]`, `[server]`, `[retention]` and `[log]`: what there is once.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use super::super::faults::suggestion;
use super::super::model::{LogConfig, LogFormat, RetentionConfig, ServerConfig, StoreConfig};
use super::super::reader::{At, Section};
use super::{choice, set};
use crate::secret::Secret;
use crate::store::StoreUrl;

/// Most connections that may be allowed: what a machine can hold open when it is told to.
const CONNECTIONS_MAX: u64 = 65_536;
/// Shortest status token: nobody guesses 16 characters of a random one.
const TOKEN_BYTES_MIN: usize = 16;

pub(super) fn read_store(section: Section<'_, '_>, store: &mut StoreConfig) {
    if let Some(at) = section.string("url")
        && let Some(url) = section.reader.secret(&section.name("url"), &at, true)
    {
        match StoreUrl::parse(url.expose()) {
            Ok(_) => store.url = url,
            Err(text) => section.reader.fault(at.line, format!("{}: {text}", section.name("url"))),
        }
    }
    set(&mut store.schema, section.parsed("schema", |text| check_schema(text).map(|()| text.to_owned())));
    set(&mut store.notify, section.boolean("notify"));
    set(&mut store.pool, section.integer("pool", 1..=100).map(|pool| pool as usize));
    set(&mut store.statement_timeout, section.duration("statement_timeout", Duration::from_millis(100)));
    if let Some(risk) = store.risk() {
        section.warning("url", format!("{}: {risk}", section.name("url")));
    }
    section.finish();
}

fn check_schema(text: &str) -> Result<(), String> {
    if text.is_empty() || text.len() > 63 || text.contains('\0') || text.starts_with("pg_") {
        return Err(format!("{text:?} cannot be a schema; 1 to 63 bytes, not beginning with pg_"));
    }
    Ok(())
}

pub(super) fn read_server(section: Section<'_, '_>, server: &mut ServerConfig) {
    let listen = section.parsed("listen", |text| {
        text.parse::<SocketAddr>()
            .map_err(|_| format!("{text:?} is no address; write IP:PORT, e.g. \"127.0.0.1:8600\""))
    });
    set(&mut server.listen, listen);
    set(&mut server.limits.connections, section.integer("connections", 1..=CONNECTIONS_MAX).map(|most| most as usize));
    set(&mut server.limits.header_timeout, section.duration("header_timeout", Duration::from_millis(100)));
    set(&mut server.stop_timeout, section.duration("stop_timeout", Duration::from_millis(100)));
    server.status_token = section.string("status_token").and_then(|at| read_token(&section, &at));
    if let Some(risk) = server.risk() {
        section.warning("listen", format!("{}: {risk}", section.name("listen")));
    }
    section.finish();
}

/// `None` after a fault, and where it is unset for a command that does not need it.
fn read_token(section: &Section<'_, '_>, at: &At<String>) -> Option<Secret> {
    let name = section.name("status_token");
    let token = section.reader.secret(&name, at, false)?;
    let length = token.expose().len();
    if at.value.starts_with("env:") && length == 0 {
        return None;
    }
    if length < TOKEN_BYTES_MIN || !token.expose().bytes().all(|byte| byte.is_ascii_graphic()) {
        let text = format!(
            "{name} must have {TOKEN_BYTES_MIN} visible ASCII characters or more, and no space; make one with: openssl rand -hex 32"
        );
        section.reader.fault(at.line, text);
        return None;
    }
    Some(token)
}

/// Gives the line of `remember_ids`, if it is there.
pub(super) fn read_retention(section: Section<'_, '_>, retention: &mut RetentionConfig) -> Option<usize> {
    set(&mut retention.older_than, section.duration("older_than", Duration::ZERO));
    set(&mut retention.remember_ids, section.duration("remember_ids", Duration::ZERO));
    set(&mut retention.schedule, section.parsed("schedule", str::parse));
    let line = section.string("remember_ids").map(|at| at.line);
    section.finish();
    line
}

/// What a log filter may begin with.
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

pub(super) fn read_log(section: Section<'_, '_>, log: &mut LogConfig) {
    let level = section.parsed("level", |text| {
        // A whole filter (`info,postbox_engine=debug`) is checked by the subscriber that reads it; one word is checked here.
        let known: HashSet<&str> = LEVELS.into();
        if text.contains(['=', ',']) || known.contains(text) {
            return Ok(text.to_owned());
        }
        Err(format!("{text:?} is no level; {}", suggestion(text, &LEVELS)))
    });
    set(&mut log.level, level);
    set(&mut log.format, choice(&section, "format", &[("text", LogFormat::Text), ("json", LogFormat::Json)]));
    section.finish();
}
