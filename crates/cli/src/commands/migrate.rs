//! `postbox migrate up|down|validate|print|grants|rebase`.

use postbox_server::{Roles, check_standby};
use serde_json::json;

use crate::context::Context;
use crate::failure::Failure;
use crate::output;
use crate::stores::{OfStore, ask_each};

pub(super) async fn up(contexts: &[Context], json: bool) -> Result<(), Failure> {
    let up = async |context: &Context| {
        let store = context.any_store().await?;
        let mut applied = store.up().await?;
        if let Some(log) = &context.log
            && !store.logs().await?.contains(log)
        {
            store.create_log(log).await?;
            applied.push(format!("log {log}"));
        }
        // Migrations bring nothing back, so "up to date" would be wrong.
        match store.check_integrity().await {
            Err(error) if error.code() == "schema_damaged" => return Err(error.into()),
            _ => {}
        }
        // Of a standby with the schema, "up to date" is true, and nothing else works there.
        if let Err(error) = check_standby(store.as_ref()).await {
            context.note(&format!("{} ({})", error.message(), error.code()));
        }
        Ok(applied)
    };
    let asked = ask_each(contexts, up).await;
    if json {
        let all = asked.answers.iter().map(|(context, applied)| OfStore::new(context, json!({ "applied": applied })));
        if asked.is_answered() {
            output::json(&all.collect::<Vec<_>>());
        }
        return asked.ended;
    }
    for (context, applied) in &asked.answers {
        for name in applied {
            output::line(&context.named(&format!("applied {name}")));
        }
        output::line(&context.named(if applied.is_empty() {
            "the schema is up to date"
        } else {
            "the schema is ready"
        }));
    }
    asked.ended
}

pub(super) async fn down(context: &Context, yes: bool, discard_events: bool, json: bool) -> Result<(), Failure> {
    if !yes {
        return Err(Failure::usage(context.with_store(
            "this removes everything Postbox created, including its events; to do it, run: postbox migrate down --yes",
        )));
    }
    let removed = context.any_store().await?.down(discard_events).await?;
    if json {
        output::json(&json!({ "removed": removed }));
        return Ok(());
    }
    for name in &removed {
        output::line(&format!("removed {name}"));
    }
    output::line(if removed.is_empty() { "there was no schema" } else { "the schema is gone" });
    Ok(())
}

pub(super) async fn validate(contexts: &[Context], json: bool) -> Result<(), Failure> {
    let validate = async |context: &Context| {
        let store = context.any_store().await?;
        store.validate().await?;
        Ok(store.check_integrity().await?)
    };
    let asked = ask_each(contexts, validate).await;
    if json {
        let all = asked.answers.iter().map(|(context, ())| OfStore::new(context, json!({ "right": true })));
        if asked.is_answered() {
            output::json(&all.collect::<Vec<_>>());
        }
        return asked.ended;
    }
    for (context, ()) in &asked.answers {
        output::line(&context.named("the schema is valid"));
    }
    asked.ended
}

pub(super) async fn print(context: &Context) -> Result<(), Failure> {
    output::print(&context.any_store().await?.script());
    Ok(())
}

pub(super) async fn grants(context: &Context, roles: &Roles) -> Result<(), Failure> {
    output::print(&postbox_server::grants(&context.config.store, roles).await?);
    Ok(())
}

pub(super) async fn rebase(context: &Context, json: bool) -> Result<(), Failure> {
    context.any_store().await?.rebase().await?;
    output::done(json, &json!({ "rebased": true }), "cursors and rows fit this cluster; start the relays again");
    Ok(())
}
