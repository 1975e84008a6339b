//! Webhook ingress: `POST /in/{source}`. Each message is verified on its raw bytes, stored once,
//! and answered only after that.
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
//! | 200 | stored before: the same body (duplicate), or another one (conflict: rejected, counted, logged); a handshake; or your own function ([`WebhookSource::convert`]) returned nothing to store |
//! | 401 | not verified; the body never gives the reason, the counter does |
//! | 404 | no such source |
//! | 413, 415, 501 | the body is too large, has a content encoding, or a transfer coding other than `chunked` |
//! | 422 | verified, but it has no id, topic or tenant where the mapping expects it, or breaks a limit of events |
//! | 429 + `Retry-After` | verified, but above the source's rate; nothing is stored |
//! | 500 | your own function panicked |
//! | 503 + `Retry-After` | the store is down or too slow, too many messages are being received, or the body is too slow (or was dropped as the oldest when the buffer was full). SNS gets it also for a genuine message that is refused for now |
//!
//! A replay storm is logged as a warning once in ten minutes: within a minute, a source had at
//! least 100 verified arrivals, and more than half of them were repetitions (known ids, or
//! timestamps that are too old).
//!
//! Nothing of an unverified request is stored, not even its id. A conflict is answered with success
//! because repeating it cannot change the result, and a sender that gets an error repeats for days.
//!
//! Every success of a Twilio or Slack source is a 200 with nothing that a person would be shown:
//! `<Response/>` for Twilio, an empty body for Slack.

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
pub use sns::SnsClient;
pub use source::{SourceLimits, WebhookSource};
