//! The contents of `#[event(…)]`.

use syn::meta::ParseNestedMeta;
use syn::spanned::Spanned as _;
use syn::{Attribute, Data, DeriveInput, Field, Ident, LitInt, LitStr, Result, Type};

/// The attributes of a type.
#[derive(Default)]
pub(crate) struct Attributes {
    pub(crate) topic: Option<LitStr>,
    pub(crate) key: Option<LitStr>,
    pub(crate) schema_version: Option<LitInt>,
    /// The type of an older version.
    pub(crate) from: Option<Type>,
    pub(crate) aggregate: Option<LitStr>,
    pub(crate) kind: Option<LitStr>,
}

const KNOWN: &str = "topic, key, schema_version, from, aggregate, kind";

impl Attributes {
    /// Reads every `#[event(…)]` of a type.
    pub(crate) fn of(input: &DeriveInput) -> Result<Self> {
        let name = &input.ident;
        let is_ours = |attribute: &&Attribute| attribute.path().is_ident("event");
        // Ignored, it would look as if the event had a key.
        if let Some(misplaced) = inside(&input.data).into_iter().find(is_ours) {
            let message =
                format!("#[event(…)] belongs above `{name}`; the key is a field's name there: key = \"order\"");
            return Err(syn::Error::new(misplaced.span(), message));
        }
        let mut read = Self::default();
        for attribute in input.attrs.iter().filter(is_ours) {
            attribute.parse_nested_meta(|meta| read.take(&meta))?;
        }
        if read.topic.is_none() {
            let message =
                format!("`{name}` has no topic; write #[event(topic = \"…\")] above it, as in \"order.paid\"");
            return Err(syn::Error::new(name.span(), message));
        }
        Ok(read)
    }

    fn take(&mut self, meta: &ParseNestedMeta<'_>) -> Result<()> {
        let name = meta.path.get_ident().map(Ident::to_string).unwrap_or_default();
        match name.as_str() {
            "topic" => once(&mut self.topic, checked_topic(meta.value()?.parse()?)?, meta),
            "key" => once(&mut self.key, meta.value()?.parse()?, meta),
            "schema_version" => once(&mut self.schema_version, checked_version(meta.value()?.parse()?)?, meta),
            "from" => {
                let from: LitStr = meta.value()?.parse()?;
                let no_type = || format!("`{}` is no type; name that of the older version", from.value());
                once(&mut self.from, from.parse().map_err(|_| syn::Error::new(from.span(), no_type()))?, meta)
            }
            "aggregate" => once(&mut self.aggregate, meta.value()?.parse()?, meta),
            "kind" => once(&mut self.kind, meta.value()?.parse()?, meta),
            _ => Err(meta.error(format!("unknown attribute; known: {KNOWN}"))),
        }
    }
}

/// Returns the attributes of the fields and variants.
fn inside(data: &Data) -> Vec<&Attribute> {
    fn of<'d>(fields: impl IntoIterator<Item = &'d Field>) -> impl Iterator<Item = &'d Attribute> {
        fields.into_iter().flat_map(|field| &field.attrs)
    }
    match data {
        Data::Struct(data) => of(&data.fields).collect(),
        Data::Enum(data) => data.variants.iter().flat_map(|it| it.attrs.iter().chain(of(&it.fields))).collect(),
        Data::Union(data) => of(&data.fields.named).collect(),
    }
}

fn once<T>(slot: &mut Option<T>, value: T, meta: &ParseNestedMeta<'_>) -> Result<()> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(meta.error("this is said twice; keep one")),
    }
}

/// Checks a topic like `postbox::contract::Topic`, which checks it again, with the length, at every
/// append.
fn checked_topic(topic: LitStr) -> Result<LitStr> {
    let text = topic.value();
    if text.is_empty() || text.contains(|c: char| c.is_whitespace() || c.is_control()) {
        let message = "a topic is not empty and has no white space; use dots, as in \"order.paid\"";
        return Err(syn::Error::new(topic.span(), message));
    }
    if text.contains('*') {
        return Err(syn::Error::new(topic.span(), "a type has one topic, not a pattern of topics"));
    }
    Ok(topic)
}

fn checked_version(version: LitInt) -> Result<LitInt> {
    match version.base10_parse::<u32>() {
        Ok(1..) => Ok(version),
        _ => Err(syn::Error::new(version.span(), "a schema version is a whole number from 1")),
    }
}
