//! `postbox doctor`: why something is late. It asks the store, and the service at the configured
//! address, if one is there, for what only that process knows: since when its breakers are open.

use postbox_core::{LogName, Store};
use postbox_server::status::{self, Finding, Severity};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

pub(super) async fn run(context: &Context, json: bool) -> Result<(), Failure> {
    let store = context.any_store().await?;
    let looking = async {
        store.validate().await?;
        store.subscriptions().await
    };
    let findings = match looking.await {
        Ok(_) => look(context, store.as_ref()).await?,
        Err(error) => vec![Finding::from(error)],
    };
    if json {
        output::json(&findings)?;
    } else {
        output::fields(&fields(&findings))?;
    }
    match findings.iter().any(|finding| finding.severity == Severity::Problem) {
        true => Err(Failure::failed("there are problems, listed above")),
        false => Ok(()),
    }
}

async fn look(context: &Context, store: &dyn Store) -> Result<Vec<Finding>, Failure> {
    context.known_log(store).await?;
    let infos = context.registered(store).await?;
    let unread = context.unread(store).await?;
    let mut findings = Vec::new();
    findings.extend(context.never_run(&infos).map(|name| Finding {
        subscription: Some(name.to_string()),
        ..Finding::problem("it was never run: nobody reads for it", "start `postbox run`")
    }));
    if findings.is_empty() && infos.is_empty() && unread.is_empty() {
        let log = context.log.clone().unwrap_or_else(LogName::outbox);
        let what = format!("there is no subscription: nobody reads the {log}");
        findings.push(Finding::problem(what, context.reader_wanted(&log)));
    }
    findings.extend(unread.iter().map(|(log, count)| Finding::unread(log, *count, context.reader_wanted(log))));
    let service = status::fetch(&context.config.server).await;
    findings.extend(status::diagnose(store, &infos, service.as_ref()).await?);
    if !context.config.sources.is_empty() {
        findings.extend(store.check_receiving().await.err().map(Finding::from));
    }
    Ok(findings)
}

/// What was found, and below it what to do.
pub(crate) fn fields(findings: &[Finding]) -> Vec<(String, String)> {
    let mut fields = Vec::new();
    for finding in findings {
        let mark = match finding.severity {
            Severity::Fine => "ok",
            Severity::Note => "note",
            Severity::Problem => "PROBLEM",
        };
        let whose = finding.subscription.as_deref().unwrap_or("store");
        fields.push((format!("{mark:<7}"), format!("{whose}: {}", finding.what)));
        fields.extend(finding.cure.iter().map(|cure| (String::new(), format!("-> {cure}"))));
    }
    fields
}
