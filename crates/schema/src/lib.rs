#![doc = include_str!("../README.md")]

use std::collections::BTreeMap;
use std::fmt;

use jsonschema::error::ValidationErrorKind;
use jsonschema::{Retrieve, Uri, ValidationError, Validator};
use postbox_core::{Error, ErrorKind, Result, Schemas, Topic};
use serde_json::Value;

/// Maximum issues listed for one payload. A fault in every element of a large array would only
/// repeat itself.
const ISSUES_MAX: usize = 20;
/// Largest payload, in bytes, whose issues are listed. The validator collects all issues before it
/// names one, even the first: those of every branch of an `anyOf` or `oneOf`, each with a copy of
/// its value. They take up to 1,000 times the memory of the payload, for each branch.
const LISTED_BYTES_MAX: usize = 64 * 1024;

/// The JSON Schemas of topics, each for one schema version.
///
/// Supports drafts 4 to 2020-12, by `$schema`; the default is 2020-12. `format` is not checked in
/// any of them: use `pattern`.
#[derive(Default)]
pub struct JsonSchemas {
    validators: BTreeMap<String, BTreeMap<u32, Validator>>,
}

impl JsonSchemas {
    /// Creates an empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the schema of a topic's payloads for this version, as JSON text.
    ///
    /// Errors: `schema_invalid` if it is not a schema, or refers to another document;
    /// `schema_twice`; those of a topic.
    pub fn add(self, topic: &str, schema_version: u32, schema: &str) -> Result<Self> {
        let schema = serde_json::from_str(schema).map_err(|error| invalid(topic, schema_version, &error))?;
        self.insert(topic, schema_version, &schema)
    }

    /// Adds the schema of a type.
    #[cfg(feature = "schemars")]
    pub fn add_type<T: postbox_core::TypedEvent + schemars::JsonSchema>(self) -> Result<Self> {
        self.insert(T::TOPIC, T::SCHEMA_VERSION, schemars::schema_for!(T).as_value())
    }

    fn insert(mut self, topic: &str, schema_version: u32, schema: &Value) -> Result<Self> {
        Topic::new(topic)?;
        // By default drafts 4, 6 and 7 check formats; the later ones do not.
        let options = jsonschema::options().with_retriever(NoOtherDocuments).should_validate_formats(false);
        let validator = options.build(schema).map_err(|error| invalid(topic, schema_version, &error))?;
        let versions = self.validators.entry(topic.to_owned()).or_default();
        if versions.insert(schema_version, validator).is_some() {
            let message = format!("{topic} has two schemas of version {schema_version}; keep one");
            return Err(Error::new(ErrorKind::Conflict, "add schema", "schema_twice", message));
        }
        Ok(self)
    }
}

impl Schemas for JsonSchemas {
    fn check(&self, topic: &str, schema_version: u32, payload: &[u8]) -> Result<()> {
        let Some(validator) = self.validators.get(topic).and_then(|versions| versions.get(&schema_version)) else {
            return Ok(());
        };
        let issues = match serde_json::from_slice::<Value>(payload) {
            Err(error) => vec![format!("it is not JSON (line {}, column {})", error.line(), error.column())],
            Ok(value) if validator.is_valid(&value) => return Ok(()),
            Ok(_) if payload.len() > LISTED_BYTES_MAX => {
                let length = payload.len();
                vec![format!(
                    "its {length} bytes are too many to list the issues; up to {LISTED_BYTES_MAX} they are listed"
                )]
            }
            Ok(value) => listed(validator.iter_errors(&value)),
        };
        Err(Error::schema_violated(topic, schema_version, &issues.join("; ")))
    }

    fn knows(&self, topic: &str) -> bool {
        self.validators.contains_key(topic)
    }
}

impl fmt::Debug for JsonSchemas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let versions = |versions: &BTreeMap<u32, Validator>| versions.keys().copied().collect::<Vec<_>>();
        f.debug_map().entries(self.validators.iter().map(|(topic, its)| (topic, versions(its)))).finish()
    }
}

/// Fetches nothing, whatever features of `jsonschema` other crates turn on.
struct NoOtherDocuments;

impl Retrieve for NoOtherDocuments {
    fn retrieve(&self, uri: &Uri<String>) -> std::result::Result<Value, Box<dyn std::error::Error + Send + Sync>> {
        Err(format!("it refers to another document, {uri}").into())
    }
}

fn invalid(topic: &str, schema_version: u32, error: &dyn fmt::Display) -> Error {
    let message = format!("the schema of {topic}, version {schema_version}, cannot be used: {error}");
    Error::invalid("add schema", "schema_invalid", message)
}

/// Lists the issues, each with its place and its rule. The payload is not quoted: it may hold a
/// secret, and errors go into logs.
fn listed<'e>(issues: impl Iterator<Item = ValidationError<'e>>) -> Vec<String> {
    let mut issues = issues.map(|issue| {
        let rule = issue.schema_path().as_str();
        // The name of a property that the schema does not name comes from the payload. A short
        // number is the place in a list.
        let is_place = |name: &str| name.len() <= 5 && name.bytes().all(|byte| byte.is_ascii_digit());
        let is_known = |name: &str| is_place(name) || rule.split('/').any(|of_rule| of_rule == name);
        let named = |name: &str| if is_known(name) { format!("/{name}") } else { "/…".to_owned() };
        let place: String = issue.instance_path().as_str().split('/').skip(1).map(named).collect();
        let place = if place.is_empty() { "/" } else { &place };
        let kind = issue.kind();
        let why = match kind {
            ValidationErrorKind::AdditionalProperties { unexpected: names }
            | ValidationErrorKind::UnevaluatedProperties { unexpected: names } => {
                format!("{} properties are not allowed", names.len())
            }
            ValidationErrorKind::PropertyNames { .. } => "the name of a property is not allowed".to_owned(),
            _ => issue.masked().to_string(),
        };
        format!("{place} ({}): {why}", kind.keyword())
    });
    let mut listed: Vec<String> = issues.by_ref().take(ISSUES_MAX).collect();
    match issues.count() {
        0 => {}
        more => listed.push(format!("and {more} more")),
    }
    listed
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAID: &str = r#"{
        "type": "object",
        "required": ["order", "cents"],
        "properties": {"order": {"type": "integer"}, "cents": {"type": "integer", "minimum": 1}, "note": {"maxLength": 3}}
    }"#;

    fn code(built: Result<JsonSchemas>) -> String {
        built.expect_err("refused").code().to_owned()
    }

    #[test]
    fn every_issue_is_named_with_its_place_and_rule_and_without_the_value() {
        let schemas = JsonSchemas::new().add("order.paid", 1, PAID).expect("a schema");
        let check = |payload: &str| schemas.check("order.paid", 1, payload.as_bytes());
        check(r#"{"order": 1, "cents": 5}"#).expect("as it says");
        let error = check(r#"{"order": "secret", "cents": 0, "note": "secret"}"#).expect_err("refused");
        assert_eq!((error.kind(), error.code()), (ErrorKind::Invalid, "schema_violated"));
        for named in ["/order (type): ", "/cents (minimum): ", "/note (maxLength): "] {
            assert!(error.message().contains(named), "{error}");
        }
        assert!(!error.message().contains("secret"), "{error}");
        assert!(check("{}").expect_err("refused").message().matches("/ (required): ").count() == 2);
        assert!(check("{").expect_err("refused").message().contains("not JSON (line 1, column 1)"));
    }

    /// Names of properties are part of the payload too.
    #[test]
    fn a_name_that_the_schema_does_not_name_is_not_quoted() {
        for schema in [
            r#"{"propertyNames": {"maxLength": 3}}"#,
            r#"{"additionalProperties": false}"#,
            r#"{"unevaluatedProperties": false}"#,
            r#"{"additionalProperties": {"type": "integer"}}"#,
        ] {
            let schemas = JsonSchemas::new().add("t", 1, schema).expect("a schema");
            let error = schemas.check("t", 1, br#"{"secret": "secret"}"#).expect_err("refused");
            assert!(!error.message().contains("secret"), "{error}");
        }
    }

    #[test]
    fn only_so_many_issues_are_named() {
        let schemas = JsonSchemas::new().add("t", 1, r#"{"items": {"type": "integer"}}"#).expect("a schema");
        let payload = serde_json::to_vec(&vec!["x"; ISSUES_MAX + 5]).expect("written");
        let error = schemas.check("t", 1, &payload).expect_err("refused");
        assert_eq!(error.message().matches("(type)").count(), ISSUES_MAX);
        assert!(error.message().ends_with("; and 5 more"), "{error}");
    }

    /// Collected, the issues of a long payload would take gigabytes.
    #[test]
    fn of_a_long_payload_no_issue_is_collected() {
        let payload = serde_json::to_vec(&vec!["x"; LISTED_BYTES_MAX / 4 + 1]).expect("written");
        let items = r#"{"items": {"type": "integer"}}"#;
        for schema in [items.to_owned(), format!(r#"{{"anyOf": [{items}, {items}]}}"#)] {
            let schemas = JsonSchemas::new().add("t", 1, &schema).expect("a schema");
            let error = schemas.check("t", 1, &payload).expect_err("refused");
            assert!(error.message().ends_with("up to 65536 they are listed"), "{error}");
        }
    }

    #[test]
    fn what_has_no_schema_is_not_checked() {
        let schemas = JsonSchemas::new().add("order.paid", 2, PAID).expect("a schema");
        schemas.check("order.paid", 1, b"{}").expect("another version");
        schemas.check("order.lost", 2, b"no JSON").expect("another topic");
        schemas.check("order.paid", 2, b"{}").expect_err("refused");
        assert_eq!(format!("{schemas:?}"), r#"{"order.paid": [2]}"#);
    }

    #[test]
    fn no_draft_checks_formats() {
        for draft in ["", r#""$schema": "http://json-schema.org/draft-07/schema#","#] {
            let schema = format!(r#"{{{draft} "properties": {{"at": {{"type": "string", "format": "date-time"}}}}}}"#);
            let schemas = JsonSchemas::new().add("t", 1, &schema).expect("a schema");
            schemas.check("t", 1, br#"{"at": "yesterday"}"#).expect("not checked");
            schemas.check("t", 1, br#"{"at": 1}"#).expect_err("its type is");
        }
    }

    #[test]
    fn a_schema_that_cannot_be_used_is_refused_at_once() {
        let add = |topic: &str, schema: &str| JsonSchemas::new().add(topic, 1, schema);
        for schema in ["", r#"{"type": "number of cents"}"#, r#"{"$ref": "https://example.org/paid.json"}"#] {
            assert_eq!(code(add("t", schema)), "schema_invalid", "{schema}");
        }
        assert_eq!(code(add("", "{}")), "topic_empty");
        assert_eq!(code(add("t", "{}").and_then(|schemas| schemas.add("t", 1, "{}"))), "schema_twice");
    }

    #[cfg(feature = "schemars")]
    #[test]
    fn a_type_has_a_schema() {
        #[derive(schemars::JsonSchema)]
        #[expect(dead_code, reason = "only its schema is looked at")]
        struct Paid {
            order: i64,
        }

        impl postbox_core::TypedEvent for Paid {
            const TOPIC: &'static str = "order.paid";
            const SCHEMA_VERSION: u32 = 2;
        }

        let schemas = JsonSchemas::new().add_type::<Paid>().expect("a schema");
        schemas.check("order.paid", 2, br#"{"order": 1}"#).expect("as the type is");
        schemas.check("order.paid", 2, br#"{"order": "x"}"#).expect_err("not as the type is");
    }
}
