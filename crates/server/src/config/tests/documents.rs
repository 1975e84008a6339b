//! Everything generated from the declared keys agrees with what the parser accepts.

use std::path::PathBuf;

use postbox_config::{Key, Table as _, guide_table};
use serde_json::Value;
use toml::Table;

use super::super::{Config, default_toml, json_schema};
use super::{examples_in_the_documentation, uncommented};

/// The path of the first key of `value` that the schema does not have.
fn unknown(value: &toml::Value, schema: &Value) -> Option<String> {
    for choice in ["oneOf", "anyOf"] {
        if let Some(choices) = schema[choice].as_array() {
            let fits = |choice: &&Value| {
                let kind = &choice["properties"]["type"]["const"];
                kind.is_null() || kind.as_str() == value.get("type").and_then(|kind| kind.as_str())
            };
            let mut faults = choices.iter().filter(fits).map(|choice| unknown(value, choice));
            return faults.find(Option::is_none).unwrap_or_else(|| Some(format!("is none of {choice}")));
        }
    }
    match (value, schema["type"].as_str()) {
        (toml::Value::Table(table), Some("object")) => table.iter().find_map(|(key, value)| {
            let known = &schema["properties"][key];
            let rest = &schema["additionalProperties"];
            let schema = if known.is_object() { known } else { rest };
            let fault = if schema.is_object() { unknown(value, schema)? } else { "is unknown".to_owned() };
            Some(format!("{key}.{fault}"))
        }),
        (toml::Value::Array(items), Some("array")) => items.iter().find_map(|item| unknown(item, &schema["items"])),
        (toml::Value::Integer(_), Some("integer")) | (toml::Value::Boolean(_), Some("boolean")) => None,
        (toml::Value::Integer(_) | toml::Value::Float(_), Some("number")) => None,
        (toml::Value::String(_), Some("string")) => None,
        (toml::Value::String(word), None) if schema["enum"].is_array() => {
            let words = schema["enum"].as_array()?;
            (!words.iter().any(|known| known == word.as_str())).then(|| format!("is not {words:?}"))
        }
        (toml::Value::String(word), None) if schema["const"] == word.as_str() => None,
        (_, wanted) => Some(format!("should be {wanted:?}")),
    }
}

fn check(text: &str) -> Option<String> {
    let table: Table = text.parse().expect("TOML");
    unknown(&toml::Value::Table(table), &json_schema())
}

#[test]
fn the_schema_knows_the_default_file_and_every_example() {
    assert_eq!(check(&default_toml()), None);
    assert_eq!(check(&uncommented()), None);
    for (page, example) in examples_in_the_documentation() {
        assert_eq!(check(&example), None, "{page}\n{example}");
    }
    for (wrong, place) in [
        ("[sevrer]", "sevrer"),
        ("[subscriptions.a]\nbatsh = 1", "subscriptions.a.batsh"),
        ("[subscriptions.a]\nordering = \"random\"", "subscriptions.a.ordering"),
        ("[subscriptions.a]\nsink = { type = \"htpp\" }", "subscriptions.a.sink"),
        ("[subscriptions.a]\nsink = { type = \"file\", url = \"x\" }", "subscriptions.a.sink"),
        ("[sources.a]\ntype = \"webhook\"\nsecrets = [{ secret = \"x\", untill = \"x\" }]", "sources.a"),
        ("[server]\nconnections = \"many\"", "server.connections"),
    ] {
        assert!(check(wrong).is_some_and(|fault| fault.starts_with(place)), "{wrong}: {:?}", check(wrong));
    }
}

#[test]
fn the_schema_says_what_editors_show() {
    let schema = json_schema();
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    assert_eq!(schema["additionalProperties"], false);
    let subscription = &schema["properties"]["subscriptions"]["additionalProperties"]["properties"];
    assert_eq!(subscription["batch"]["default"], 500);
    assert_eq!(subscription["batch"]["maximum"], 10_000);
    assert_eq!(subscription["on_dead"]["enum"], serde_json::json!(["continue", "halt"]));
    assert!(subscription["lease"]["description"].as_str().is_some_and(|text| text.contains("replica")));
    let sinks = subscription["sink"]["oneOf"].as_array().expect("sinks");
    let http = sinks.iter().find(|sink| sink["properties"]["type"]["const"] == "http").expect("http");
    assert_eq!(http["required"], serde_json::json!(["url", "type"]));
}

/// Names of all keys, including those of adapters.
fn names(keys: &[Key]) -> Vec<&'static str> {
    let below = |key: &Key| {
        let variants = key.shape.variants.iter().flat_map(|variant| names(&variant.keys));
        names(&key.shape.keys).into_iter().chain(variants).chain([key.name]).collect::<Vec<_>>()
    };
    keys.iter().flat_map(below).collect()
}

#[test]
fn every_key_appears_in_the_default_file() {
    let text = default_toml();
    let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    let missing: Vec<_> = names(&Config::keys()).into_iter().filter(|name| !words.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?} in\n{text}");
}

/// The guide's tables equal the declared keys. `UPDATE=1` rewrites them.
#[test]
fn the_tables_of_the_guide_are_those_of_the_declared_keys() {
    const BEGIN: &str = "<!-- keys: ";
    const END: &str = "<!-- end of keys -->";
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/configuration.md");
    let guide = std::fs::read_to_string(&path).expect("the guide");
    let (keys, mut places) = (Config::keys(), Vec::new());
    let mut parts = guide.split(BEGIN);
    let mut fresh = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (place, rest) = part.split_once(" -->").expect("the place has a name");
        let (_, after) = rest.split_once(END).expect("the place has an end");
        let table = guide_table(&keys, place).unwrap_or_else(|| panic!("there are no keys {place}"));
        fresh += &format!("{BEGIN}{place} -->\n\n{}\n\n{END}{after}", table.trim_end());
        places.push(place);
    }
    for place in keys.iter().map(|key| key.name).chain(["subscriptions.sink"]) {
        assert!(places.contains(&place), "the guide has no {BEGIN}{place} -->");
    }
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, fresh).expect("the guide can be written");
        return;
    }
    let line = guide.lines().zip(fresh.lines()).position(|(is, should)| is != should);
    assert!(
        guide == fresh,
        "docs/guide/configuration.md:{}: not as declared; run UPDATE=1 cargo nextest run --workspace --all-features \
         --lib -E 'package(postbox-server) and test(tables_of_the_guide)'",
        line.unwrap_or_default() + 1
    );
}
