//! `postbox pause` and `postbox resume`.

use std::time::Duration;

use jiff::Timestamp;
use postbox_core::{Pause, SubscriptionName};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

pub(super) async fn pause(
    context: &Context,
    name: &SubscriptionName,
    why: String,
    span: Option<Duration>,
) -> Result<(), Failure> {
    let store = context.store().await?;
    context.registered(store.as_ref()).await?;
    let until = span
        .map(|span| Timestamp::now().checked_add(span).map_err(|_| Failure::usage("--for: that is too long a time")))
        .transpose()?;
    let by = std::env::var("USER").ok().filter(|user| !user.is_empty()).unwrap_or_else(|| "somebody".into());
    store.pause(name, Some(&Pause { until, by, why })).await?;
    match until {
        Some(until) => output::line(&format!("{name} is paused until {until:.0}")),
        None => output::line(&format!("{name} is paused; go on with: postbox resume {name}")),
    }
}

pub(super) async fn resume(context: &Context, name: &SubscriptionName) -> Result<(), Failure> {
    let store = context.store().await?;
    context.registered(store.as_ref()).await?;
    store.pause(name, None).await?;
    output::line(&format!("{name} goes on"))
}
