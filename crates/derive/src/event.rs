//! Generates the implementation for a type.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::spanned::Spanned as _;
use syn::{Data, DeriveInput, LitStr, Member, Result, Type};

use crate::attributes::Attributes;

pub(crate) fn derive(input: TokenStream) -> Result<TokenStream> {
    let input: DeriveInput = syn::parse2(input)?;
    let name = &input.ident;
    let Attributes { topic, key, schema_version, from, aggregate, kind } = Attributes::of(&input)?;
    let schema_version = schema_version.map(|version| quote! { const SCHEMA_VERSION: u32 = #version; });
    let key = key.map(|key| written_key(&input, &key)).transpose()?;
    let aggregate = aggregate.map(|aggregate| quote! { .aggregate(#aggregate) });
    let kind = kind.map(|kind| quote! { .kind(#kind) });
    let upcast = from.map(upcast_from);
    let (parameters, arguments, conditions) = input.generics.split_for_impl();
    Ok(quote! {
        impl #parameters ::postbox::TypedEvent for #name #arguments #conditions {
            const TOPIC: &'static str = #topic;
            #schema_version

            fn describe(&self, event: ::postbox::NewEvent) -> ::postbox::NewEvent {
                event #key #aggregate #kind
            }
            #upcast
        }
    })
}

/// The functions that read events of an older version. They have the span of the older type, so
/// that an error appears there if it cannot be converted.
fn upcast_from(older: Type) -> TokenStream {
    quote_spanned! { older.span() =>
        fn reads(version: u32) -> bool {
            version == Self::SCHEMA_VERSION || <#older as ::postbox::TypedEvent>::reads(version)
        }

        fn upcast(event: &::postbox::contract::Event) -> ::postbox::Result<Self> {
            const {
                assert!(<#older as ::postbox::TypedEvent>::SCHEMA_VERSION < Self::SCHEMA_VERSION, "`from` is no older version")
            };
            ::postbox::contract::typed::decode::<#older>(event).map(::std::convert::Into::into)
        }
    }
}

/// The call that sets the key. It has the span of the attribute, so that an error appears there if
/// the field has no `Display`. Only `self` has the span of the derive, like the `self` of the
/// signature: the attribute's text may be an argument of a macro, and there is no `self` where that
/// argument was written.
fn written_key(input: &DeriveInput, key: &LitStr) -> Result<TokenStream> {
    let name = &input.ident;
    let Data::Struct(data) = &input.data else {
        return Err(syn::Error::new(key.span(), format!("`{name}` is no struct; only a field of one can be the key")));
    };
    let missing = || syn::Error::new(key.span(), format!("`{name}` has no field `{}`", key.value()));
    // A keyword is a field's name as a raw identifier.
    let raw = || syn::parse_str(&format!("r#{}", key.value()));
    let member: Member = key.parse().or_else(|_| raw()).map_err(|_| missing())?;
    if !data.fields.members().any(|field| field == member) {
        return Err(missing());
    }
    let this = quote! { self };
    Ok(quote_spanned! { key.span() => .key(::std::string::ToString::to_string(&#this.#member)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the implementation, as text, with what a person would write.
    fn assert_derives(input: TokenStream, expected: TokenStream) {
        let derived = derive(input).expect("derived");
        assert_eq!(derived.to_string(), expected.to_string());
    }

    fn fault(input: &str) -> String {
        derive(input.parse().expect("tokens")).expect_err("refused").to_string()
    }

    #[test]
    fn every_attribute_has_its_place() {
        assert_derives(
            quote! {
                #[event(topic = "order.paid", key = "order", schema_version = 2)]
                #[event(aggregate = "order", kind = "integration")]
                struct OrderPaid { order: i64, cents: i64 }
            },
            quote! {
                impl ::postbox::TypedEvent for OrderPaid {
                    const TOPIC: &'static str = "order.paid";
                    const SCHEMA_VERSION: u32 = 2;

                    fn describe(&self, event: ::postbox::NewEvent) -> ::postbox::NewEvent {
                        event.key(::std::string::ToString::to_string(&self.order)).aggregate("order").kind("integration")
                    }
                }
            },
        );
    }

    #[test]
    fn an_older_version_is_read_by_its_type() {
        assert_derives(
            quote! { #[event(topic = "t", schema_version = 2, from = "old::A")] struct A; },
            quote! {
                impl ::postbox::TypedEvent for A {
                    const TOPIC: &'static str = "t";
                    const SCHEMA_VERSION: u32 = 2;

                    fn describe(&self, event: ::postbox::NewEvent) -> ::postbox::NewEvent { event }

                    fn reads(version: u32) -> bool {
                        version == Self::SCHEMA_VERSION || <old::A as ::postbox::TypedEvent>::reads(version)
                    }

                    fn upcast(event: &::postbox::contract::Event) -> ::postbox::Result<Self> {
                        const {
                            assert!(<old::A as ::postbox::TypedEvent>::SCHEMA_VERSION < Self::SCHEMA_VERSION, "`from` is no older version")
                        };
                        ::postbox::contract::typed::decode::<old::A>(event).map(::std::convert::Into::into)
                    }
                }
            },
        );
    }

    #[test]
    fn a_topic_is_enough_for_any_type() {
        let describe = quote! {
            fn describe(&self, event: ::postbox::NewEvent) -> ::postbox::NewEvent { event }
        };
        assert_derives(
            quote! { #[event(topic = "t")] enum Noted<T: Copy> where T: Send { A(T), B } },
            quote! {
                impl<T: Copy> ::postbox::TypedEvent for Noted<T> where T: Send {
                    const TOPIC: &'static str = "t";
                    #describe
                }
            },
        );
        assert_derives(
            quote! { #[event(topic = "t")] struct Unit; },
            quote! { impl ::postbox::TypedEvent for Unit { const TOPIC: &'static str = "t"; #describe } },
        );
    }

    #[test]
    fn the_field_of_a_tuple_is_named_by_its_number() {
        let derived = derive(quote! { #[event(topic = "t", key = "1")] struct Moved(u8, String); }).expect("derived");
        assert!(derived.to_string().contains(&quote! { (&self.1) }.to_string()), "{derived}");
        let derived =
            derive(quote! { #[event(topic = "t", key = "type")] struct Moved { r#type: u8 } }).expect("derived");
        assert!(derived.to_string().contains(&quote! { (&self.r#type) }.to_string()), "{derived}");
    }

    #[test]
    fn errors_say_what_is_wrong_and_how_to_cure_it() {
        let no_topic = r#"`A` has no topic; write #[event(topic = "…")] above it, as in "order.paid""#;
        let version = "a schema version is a whole number from 1";
        let topic = r#"a topic is not empty and has no white space; use dots, as in "order.paid""#;
        let known = "unknown attribute; known: topic, key, schema_version, from, aggregate, kind";
        let no_struct = "`A` is no struct; only a field of one can be the key";
        let misplaced = r##"#[event(…)] belongs above `A`; the key is a field's name there: key = "order""##;
        for (input, text) in [
            ("struct A { b: u8 }", no_topic),
            (r#"#[event(key = "b")] struct A { b: u8 }"#, no_topic),
            (r#"#[event(topic = "t", key = "c")] struct A { b: u8 }"#, "`A` has no field `c`"),
            (r#"#[event(topic = "t", key = "b c")] struct A { b: u8 }"#, "`A` has no field `b c`"),
            (r#"#[event(topic = "t", key = "0")] struct A;"#, "`A` has no field `0`"),
            (r#"#[event(topic = "t", key = "b")] enum A { B }"#, no_struct),
            (r#"#[event(topic = "t", keys = "b")] struct A { b: u8 }"#, known),
            (r#"#[event(topic = "t", topic = "u")] struct A;"#, "this is said twice; keep one"),
            (r#"#[event(topic = "order paid")] struct A;"#, topic),
            (r#"#[event(topic = "order.*")] struct A;"#, "a type has one topic, not a pattern of topics"),
            (r#"#[event(topic = "")] struct A;"#, topic),
            (r#"#[event(topic = "t", schema_version = 0)] struct A;"#, version),
            (r#"#[event(topic = "t", schema_version = 4294967296)] struct A;"#, version),
            (r#"#[event(topic = "t", from = "1")] struct A;"#, "`1` is no type; name that of the older version"),
            (r#"#[event(topic = "t")] struct A { #[event(key)] b: u8 }"#, misplaced),
            (r#"#[event(topic = "t")] struct A(#[event(key = "0")] u8);"#, misplaced),
            (r#"#[event(topic = "t")] enum A { #[event(topic = "u")] B }"#, misplaced),
            (r#"#[event(topic = "t")] enum A { B { #[event(key)] c: u8 } }"#, misplaced),
            (r#"#[event(topic = 1)] struct A;"#, "expected string literal"),
        ] {
            assert_eq!(fault(input), text, "{input}");
        }
    }
}
