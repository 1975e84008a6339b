//! Declared keys as JSON Schema (draft 2020-12), for editors.

use serde_json::{Map, Value, json};

use crate::key::{Key, Shape, Start, Variant};
use crate::value::Literal;

/// The schema of what may be written.
pub fn schema(shape: &Shape) -> Value {
    match shape {
        Shape::Text("duration") => json!({ "type": "string", "pattern": "^ *([0-9]+ *(ms|s|m|min|h|d) *)+$" }),
        Shape::Text("size") => json!({ "type": "string", "pattern": "^ *[0-9]+ *(B|KB|kB|KiB|MB|MiB|GB|GiB)? *$" }),
        Shape::Text(_) => json!({ "type": "string" }),
        Shape::Words(words) => json!({ "enum": words }),
        Shape::Integer(low, high) => json!({ "type": "integer", "minimum": low, "maximum": high }),
        Shape::Bool => json!({ "type": "boolean" }),
        Shape::List(item) => json!({ "type": "array", "items": schema(item) }),
        Shape::Map(value) => json!({ "type": "object", "additionalProperties": schema(value) }),
        Shape::Table(keys) => schema_object(keys),
        Shape::Either(shapes) => json!({ "anyOf": shapes.iter().map(schema).collect::<Vec<_>>() }),
        Shape::Tagged(variants, common) => {
            json!({ "oneOf": variants.iter().map(|variant| schema_variant(variant, common)).collect::<Vec<_>>() })
        }
    }
}

fn schema_variant(variant: &Variant, common: &[Key]) -> Value {
    let keys: Vec<Key> = common.iter().chain(&variant.keys).cloned().collect();
    let mut object = schema_object(&keys);
    object["description"] = variant.doc.as_str().into();
    object["properties"]["type"] = json!({ "const": variant.name });
    if let Value::Array(required) = &mut object["required"] {
        required.push("type".into());
    }
    object
}

/// The schema of a table with these keys, and no others.
pub fn schema_object(keys: &[Key]) -> Value {
    let properties: Map<String, Value> = keys.iter().map(|key| (key.name.to_owned(), property(key))).collect();
    let required = keys.iter().filter(|key| matches!(key.start, Start::Required(_))).map(|key| key.name);
    json!({
        "type": "object",
        "properties": properties,
        "required": required.collect::<Vec<_>>(),
        "additionalProperties": false,
    })
}

fn property(key: &Key) -> Value {
    let mut property = schema(&key.shape);
    property["description"] = key.doc.as_str().into();
    match key.start {
        Start::Value(Literal::Text(text)) => property["default"] = text.into(),
        Start::Value(Literal::Integer(number)) => property["default"] = number.into(),
        Start::Value(Literal::Bool(answer)) => property["default"] = answer.into(),
        // What is no JSON too, such as an inline table, is not shown.
        Start::Required(example) | Start::Unset(_, example) => {
            if let Ok(example) = serde_json::from_str::<Value>(example) {
                property["examples"] = json!([example]);
            }
        }
    }
    property
}
