//! Webhook ingress: `POST /in/{source}`, verified on the raw bytes, stored once, answered only
//! then.
//!
//! ```no_run
//! use std::sync::Arc;
//! use postbox_core::{Clock, LogName, Receive, SourceName};
//! use postbox_ingress::{Ingress, WebhookSource};
//! use postbox_webhook::{Scheme, Settings, verifier};
//!
//! # fn build(store: Arc<dyn Receive>, clock: Arc<dyn Clock>, secret: &str) -> Result<axum::Router, Box<dyn std::error::Error>> {
//! let stripe = verifier(Scheme::Stripe, &[secret], &Settings::default())?;
//! let source = WebhookSource::new(SourceName::new("stripe")?, LogName::inbox(), stripe);
//! let ingress = Ingress::new(vec![source], store, clock)?;
//! let router = postbox_ingress::router(Arc::clone(&ingress)); // merge it into your own
//! let counts = ingress.counts(); // for your metrics
//! # Ok(router) }
//! ```
//!
//! # Answers
//!
//! | status | when |
//! |---|---|
//! | 202 | stored, durably |
//! | 200 | stored before: the same body (duplicate), or another one (conflict: kept out, counted, logged); a handshake; or your own function ([`WebhookSource::convert`]) wants nothing of it |
//! | 401 | not verified; the body never says why, the counter does |
//! | 404 | no such source |
//! | 408, 413, 415, 501 | the body comes too slowly (or is the one that began first when all together are too many), is too large, has a content encoding, or another transfer coding than `chunked` |
//! | 422 | genuine, but it has no id, topic or tenant where the mapping says, or breaks a limit of events |
//! | 429 + `Retry-After` | genuine, but more than the source's rate; nothing is stored |
//! | 500 | your own function panicked |
//! | 503 + `Retry-After` | the store is down or too slow, or too much is being received at once |
//!
//! More than half of a source's genuine arrivals within a minute being repetitions (known ids,
//! times that are too old), and at least 100: that is a replay storm, and it is logged as a warning
//! once in ten minutes.
//!
//! Nothing of a request that is not verified is stored, not even its id. A conflict is answered
//! with success because no repetition could change it, and a sender that hears an error repeats for
//! days.

mod answer;
mod body;
mod buffer;
mod config;
mod convert;
mod handshake;
mod headers;
mod ingress;
mod json;
mod mapping;
mod receive;
mod sns;
mod source;

pub use answer::Count;
pub use config::WebhookTable;
pub use convert::Message;
pub use ingress::{Ingress, router, router_below};
pub use mapping::{Mapping, Origin};
pub use source::{SourceLimits, WebhookSource};
