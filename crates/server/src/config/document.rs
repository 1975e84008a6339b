//! What is made from the declared keys: the commented file, the tables of the guide, the schema.

use std::fmt::Write as _;

use postbox_config::{Fields as _, Key, Shape, Variant, commented, guide_table, schema_object};
use serde_json::Value;

use super::{Config, LogConfig, RetentionConfig, ServerConfig, SubscriptionConfig};
use crate::sinks::SINKS;
use crate::sources::SourceConfig;
use crate::stores::StoreConfig;

/// The commented file that `postbox init` writes; every value in it is the default.
pub fn default_toml() -> String {
    let mut text = String::from(
        "# Postbox. Every value below is the default; uncomment what you change.\n\
         # Check it with `postbox check-config`. Secrets can be written as \"env:NAME\".\n",
    );
    let mut section = |head: &str, keys: String| {
        let _ = write!(text, "\n{head}\n{keys}");
    };
    section("[store]", commented(&StoreConfig::keys(), false));
    section(
        "# Who reads which log, and where the events go. One section for each reader.\n#[subscriptions.orders-out]",
        commented(&SubscriptionConfig::keys(), true),
    );
    let (variants, common) = source_variants();
    for Variant { name, keys, .. } in variants {
        section(
            "# Webhooks that come in, stored once in the inbox. This one is `POST /in/partner`.\n#[sources.partner]",
            format!("#type = {name:?}\n{}{}", commented(&common, true), commented(&keys, true)),
        );
    }
    section("[server]", commented(&ServerConfig::keys(), false));
    section("[retention]", commented(&RetentionConfig::keys(), false));
    section("[log]", commented(&LogConfig::keys(), false));
    text
}

/// The tables of `docs/guide/configuration.md`, by the names of their places there.
pub fn guide_tables() -> Vec<(&'static str, String)> {
    let typed = |variants: Vec<Variant>| {
        let parts = variants.into_iter().map(|Variant { name, doc, keys, .. }| {
            let table = if keys.is_empty() { String::new() } else { format!("\n{}", guide_table(&keys, "")) };
            format!("`type = \"{name}\"`: {doc}\n{table}")
        });
        parts.collect::<Vec<_>>().join("\n")
    };
    let (variants, common) = source_variants();
    vec![
        ("store", guide_table(&StoreConfig::keys(), "")),
        ("subscriptions", guide_table(&SubscriptionConfig::keys(), "")),
        ("sinks", typed(SINKS.iter().map(|sink| sink.variant()).collect())),
        ("source", guide_table(&common, "")),
        ("sources", typed(variants)),
        (
            "service",
            guide_table(&ServerConfig::keys(), "server.")
                + &without_head(&guide_table(&RetentionConfig::keys(), "retention."))
                + &without_head(&guide_table(&LogConfig::keys(), "log.")),
        ),
    ]
}

fn without_head(table: &str) -> String {
    table.splitn(3, '\n').nth(2).unwrap_or_default().to_owned()
}

/// The kinds of sources, and the keys that all have.
fn source_variants() -> (Vec<Variant>, Vec<Key>) {
    match SourceConfig::shape() {
        Shape::Tagged(variants, common) => (variants, common),
        _ => unreachable!("sources have a type"),
    }
}

/// The JSON Schema of the file (draft 2020-12), for editors.
pub fn json_schema() -> Value {
    let mut schema = schema_object(&Config::keys());
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema".into();
    schema["title"] = "postbox.toml".into();
    schema
}
