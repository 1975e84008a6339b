//! `postbox pause` and `postbox resume`.

use std::time::Duration;

use postbox_core::{Pause, Store, SubscriptionName};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

pub(super) async fn pause(
    context: &Context,
    name: &SubscriptionName,
    why: String,
    span: Option<Duration>,
    json: bool,
) -> Result<(), Failure> {
    let store = context.store_to_change().await?;
    check_known(context, store.as_ref(), name).await?;
    let infos = store.subscriptions().await?;
    let before = infos.iter().find(|info| info.name == *name).and_then(|info| info.paused.as_ref());
    let until = match span {
        // By the clock that ends the pause.
        Some(span) => {
            let until = store.time().await?.checked_add(span);
            Some(until.map_err(|_| Failure::usage("--for: that is too long a time"))?)
        }
        None => None,
    };
    let by = std::env::var("USER").ok().filter(|user| !user.is_empty()).unwrap_or_else(|| "somebody".into());
    store.pause(name, Some(&Pause { until, by, why })).await?;
    let line = match until {
        Some(until) => format!("{name} is paused until {until:.0}"),
        None => context.with_store(&format!("{name} is paused; resume it with: postbox resume {name}")),
    };
    let until = until.map(|until| until.to_string());
    output::done(json, &serde_json::json!({ "subscription": name, "paused": true, "until": until }), &line);
    if let Some(before) = before {
        output::note(&format!("this replaces the pause of {}: {}", before.by, before.why));
    }
    // Relays read the pause when they renew their lease.
    output::note("running relays stop within a third of their lease (3.3 s by default)");
    Ok(())
}

pub(super) async fn resume(context: &Context, name: &SubscriptionName, json: bool) -> Result<(), Failure> {
    let store = context.store_to_change().await?;
    check_known(context, store.as_ref(), name).await?;
    store.pause(name, None).await?;
    output::done(json, &serde_json::json!({ "subscription": name, "paused": false }), &format!("{name} is resumed"));
    Ok(())
}

/// Checks that `--log` and `--subscription` do not exclude `name`.
pub(super) async fn check_known(context: &Context, store: &dyn Store, name: &SubscriptionName) -> Result<(), Failure> {
    let meant = context.registered(store).await?;
    if meant.iter().any(|info| info.name == *name) {
        return Ok(());
    }
    if let Some(info) = store.subscriptions().await?.iter().find(|info| info.name == *name) {
        let text = format!("{name} reads the {}; leave --log and --subscription out, or name the right ones", info.log);
        return Err(Failure::usage(text));
    }
    if context.never_run(&meant).any(|never| never == name) {
        return Err(Failure::failed(context.why_unread(name, &store.subscriptions().await?)));
    }
    Ok(())
}
