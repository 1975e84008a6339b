//! State as data: the output of `stats`, `list`, `show` and `doctor`, the service's `/status`, and
//! the store's figures in `/metrics`. Each JSON type is declared once, here or in `postbox_core`,
//! so that a command and an HTTP answer never differ.

mod doctor;
mod event;
mod marks;
mod service;
mod stats;
mod subscription;
mod unrouted;
mod work;

pub(crate) use doctor::is_unreachable;
pub use doctor::{Finding, Severity, diagnose, unopened};
pub use event::{DeliveryJson, EventJson, RecordJson, ShowJson, TailedJson};
pub use marks::MarksJson;
pub(crate) use marks::marks;
pub use service::{ServiceStatus, StoreJson, add_marks, fetch};

pub use crate::fault::Fault;
pub use stats::{STATS_WAIT, StatsJson, stats, too_slow};
pub use subscription::{LaneJson, PauseJson, SubscriptionJson};
pub use unrouted::{OR_DELETE, UnroutedLog, unread, unrouted};
pub use work::{CallsJson, FailsJson, StormJson, WorkJson};
