//! `#[derive(Event)]`: makes a Rust type the events of one topic. Use it through the crate
//! `postbox`, which has the trait.
//!
//! It generates one `impl` and nothing else. Serde handles the payload.

mod attributes;
mod event;

use proc_macro::TokenStream;

// Documented, with examples that are tested, where `postbox` exports it. Tests here would need that
// crate, and build all of Postbox a second time, as a dependency of a macro.
/// Implements `postbox::TypedEvent` for a type: see `postbox::Event`.
#[proc_macro_derive(Event, attributes(event))]
pub fn derive_event(input: TokenStream) -> TokenStream {
    event::derive(input.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}
