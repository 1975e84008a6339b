//! `postbox migrate up|down|validate|print|grants|rebase`.

use postbox_server::Roles;

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

pub(super) async fn up(context: &Context) -> Result<(), Failure> {
    let applied = context.any_store().await?.up().await?;
    for name in &applied {
        output::line(&format!("applied {name}"))?;
    }
    output::line(if applied.is_empty() { "the schema is up to date" } else { "the schema is ready" })
}

pub(super) async fn down(context: &Context, yes: bool, discard_events: bool) -> Result<(), Failure> {
    if !yes {
        return Err(Failure::usage(
            "this removes everything Postbox made, the events it keeps too; say so with: postbox migrate down --yes",
        ));
    }
    let removed = context.any_store().await?.down(discard_events).await?;
    for name in &removed {
        output::line(&format!("removed {name}"))?;
    }
    output::line(if removed.is_empty() { "there was no schema" } else { "the schema is gone" })
}

pub(super) async fn validate(context: &Context) -> Result<(), Failure> {
    context.any_store().await?.validate().await?;
    output::line("the schema is right")
}

pub(super) async fn print(context: &Context) -> Result<(), Failure> {
    output::print(&context.any_store().await?.script())
}

pub(super) async fn grants(context: &Context, roles: &Roles) -> Result<(), Failure> {
    output::print(&postbox_server::grants(&context.config.store, roles).await?)
}

pub(super) async fn rebase(context: &Context) -> Result<(), Failure> {
    context.any_store().await?.rebase().await?;
    output::line("cursors and rows fit this cluster; start the relays again")
}
