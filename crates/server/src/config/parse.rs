//! From TOML text to a [`Config`], or to every fault in it. A file here for each section there.

mod house;
mod secrets;
mod sink;
mod source;
mod subscription;

use std::time::Duration;

use postbox_core::SourceName;
use postbox_core::limits::MESSAGE_IDS_AGE_MIN;
use postbox_webhook::Tolerance;
use toml::de::DeTable;

use super::Reading;
use super::faults::{Fault, unknown};
use super::model::{Config, SinkConfig};
use super::reader::{At, Reader, Section};
use super::values::duration_text;
use postbox_http::HttpSinkConfig;

/// Brokers of the plan that this program does not have yet, as sinks and as sources.
const BROKERS_PLANNED: [&str; 5] = ["nats", "redis", "kafka", "amqp", "sqs"];

pub(super) fn parse(text: &str, reading: &Reading<'_>) -> Result<Config, Vec<Fault>> {
    let reader = Reader::new(text, reading);
    let (root, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        let line = error.span().map_or(0, |span| reader.line(&span));
        reader.fault(line, format!("this is not TOML: {}", one_line(error.message())));
    }
    let mut config = Config::default();
    // A tree with holes would only give faults that vanish once the syntax is right.
    if errors.is_empty() {
        read_root(&Section::new(&reader, String::new(), 1, root.get_ref()), &mut config);
        Section::finish_root(&reader, root.get_ref());
    }
    let (faults, warnings) = reader.into_findings();
    config.warnings = warnings;
    if faults.is_empty() { Ok(config) } else { Err(faults) }
}

const ROOT_KEYS: [&str; 6] = ["store", "subscriptions", "sources", "server", "retention", "log"];

impl Section<'_, '_> {
    fn finish_root(reader: &Reader<'_>, root: &DeTable<'_>) {
        for name in root.keys() {
            if !ROOT_KEYS.contains(&name.get_ref().as_ref()) {
                reader.fault(reader.line(&name.span()), unknown("section", name.get_ref(), "", &ROOT_KEYS));
            }
        }
    }
}

fn read_root(root: &Section<'_, '_>, config: &mut Config) {
    if let Some(section) = root.section("store") {
        house::read_store(section, &mut config.store);
    }
    let mut lines = Vec::new();
    for (name, section) in root.section("subscriptions").map(|table| table.sections()).unwrap_or_default() {
        let subscription = subscription::read_subscription(&name, section);
        lines.extend(subscription.is_some().then_some(name.line));
        config.subscriptions.extend(subscription);
    }
    let (mut horizons, mut tolerances) = (Vec::new(), Vec::new());
    for (name, section) in root.section("sources").map(|table| table.sections()).unwrap_or_default() {
        let tolerance_line = section.line_of("tolerance");
        let source = source::read_source(&name, section);
        horizons.extend(source.as_ref().map(|source| (name.line, source.name.clone(), source.retry_horizon)));
        let tolerance = source.as_ref().zip(tolerance_line);
        tolerances.extend(tolerance.map(|(source, line)| (line, source.name.clone(), source.settings.tolerance)));
        config.sources.extend(source);
    }
    if let Some(section) = root.section("server") {
        house::read_server(section, &mut config.server);
    }
    check_targets(root.reader, &lines, config);
    let section = root.section("retention");
    let remembering = section.and_then(|section| house::read_retention(section, &mut config.retention));
    check_memory(root.reader, &horizons, config.retention.remember_ids, remembering);
    check_tolerances(root.reader, &tolerances, config.retention.remember_ids);
    if let Some(section) = root.section("log") {
        house::read_log(section, &mut config.log);
    }
}

/// A URL must not lead back to us. Names are looked up later, at each connection; numbers are known now.
fn check_targets(reader: &Reader<'_>, lines: &[usize], config: &Config) {
    for (line, subscription) in lines.iter().zip(&config.subscriptions) {
        let SinkConfig::Http(http) = &subscription.sink else { continue };
        let (allow, listening) = (http.allow.clone(), vec![config.server.listen]);
        let probe = HttpSinkConfig { allow, listening, ..HttpSinkConfig::new(http.url.as_str()) };
        for fault in probe.faults() {
            reader.fault(*line, format!("subscriptions.{}.sink: {fault}", subscription.subscription.name));
        }
    }
}

/// An id that is forgotten while its sender still repeats it would be applied a second time. Nothing is remembered for less than 7 days, whatever a
/// sender is said to do: a horizon is what its documents promise, and people send messages again by hand.
fn check_memory(
    reader: &Reader<'_>,
    horizons: &[(usize, SourceName, Duration)],
    remembered: Duration,
    line: Option<usize>,
) {
    let longest = horizons.iter().max_by_key(|(_, _, horizon)| *horizon);
    match longest {
        Some((source_line, source, horizon)) if remembered < *horizon && *horizon > MESSAGE_IDS_AGE_MIN => {
            let (remembered, horizon) = (duration_text(remembered), duration_text(*horizon));
            let text = format!(
                "retention.remember_ids is {remembered:?}, but the sender of sources.{source} repeats a message for {horizon:?}, and what is repeated \
                 after that would be applied twice; write remember_ids = {horizon:?} or longer, or sources.{source}.retry_horizon if it gives up sooner"
            );
            reader.fault(line.unwrap_or(*source_line), text);
        }
        _ if remembered < MESSAGE_IDS_AGE_MIN => {
            let (remembered, least) = (duration_text(remembered), duration_text(MESSAGE_IDS_AGE_MIN));
            let text = format!(
                "retention.remember_ids is {remembered:?}, and what is sent again after that would be applied twice; write remember_ids = {least:?}, \
                 the least, or longer"
            );
            reader.fault(line.unwrap_or_default(), text);
        }
        _ => {}
    }
}

/// A message whose id is forgotten must be too old to be taken again. Signed as far ahead as is allowed, it is young for twice the tolerance.
fn check_tolerances(reader: &Reader<'_>, tolerances: &[(usize, SourceName, Tolerance)], remembered: Duration) {
    for (line, source, tolerance) in tolerances {
        let fresh = Duration::from_secs(u64::from(tolerance.past_s) + u64::from(tolerance.future_s));
        if fresh >= remembered {
            let (fresh, remembered) = (duration_text(fresh), duration_text(remembered));
            let text = format!(
                "sources.{source}.tolerance lets a message be sent again for up to {fresh:?} (twice the tolerance), but its id is remembered for {remembered:?} \
                 only, and what comes after that would be applied twice; write tolerance = \"5m\", or a longer retention.remember_ids"
            );
            reader.fault(*line, text);
        }
    }
}

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

fn message<T>(result: postbox_core::Result<T>) -> Result<T, String> {
    result.map_err(|error| error.message().to_owned())
}

fn name_of<T>(
    section: &Section<'_, '_>,
    name: &At<String>,
    make: impl FnOnce(String) -> postbox_core::Result<T>,
) -> Option<T> {
    match make(name.value.clone()) {
        Ok(name) => Some(name),
        Err(error) => {
            section.reader.refuse(name.line, &name.value, format!("[{}]: {}", section.path, error.message()));
            None
        }
    }
}

fn choice<T: Copy>(section: &Section<'_, '_>, key: &'static str, choices: &[(&str, T)]) -> Option<T> {
    section.parsed(key, |text| {
        let found = choices.iter().find(|(word, _)| *word == text);
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        found.map(|(_, value)| *value).ok_or_else(|| format!("{text:?} is not one of {}", words.join(", ")))
    })
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
