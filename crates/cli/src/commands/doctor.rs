//! `postbox doctor`: why events are late. It asks the store, and the service at the configured
//! address, if it runs, for what only that process knows: since when its breakers are open.

use postbox_core::{Error, ErrorKind, LogName, Store, SubscriptionName};
use postbox_server::status::{self, Finding, ServiceStatus, Severity};
use postbox_server::{open_store, validate_schema};

use crate::context::{Context, NO_SUBSCRIPTION_OF_TENANT};
use crate::failure::Failure;
use crate::output;
use crate::stores::{self, OfStore, ask_each};

/// What the operator of one tenant can do about a subscription that nobody drives.
const CURE_OF_TENANT: &str = "ask whoever runs `postbox run` for all tenants whether it has this subscription";

/// Most faults of the configuration that are shown: whoever corrects it asks `check-config`.
const FAULTS_SHOWN: usize = 5;

pub(super) async fn run(contexts: &[Context], json: bool) -> Result<(), Failure> {
    let (service, silent) = match stores::fetch(contexts).await {
        Ok(service) => (service, None),
        Err(silent) => (None, Some(silent)),
    };
    let mut asked = ask_each(contexts, |context| examine(context, service.as_ref())).await;
    for (context, findings) in &mut asked.answers {
        findings.iter_mut().for_each(|it| it.cure = it.cure.take().map(|cure| context.with_store(&cure)));
    }
    if let Some((context, findings)) = asked.answers.first_mut() {
        let cure = "correct it: `postbox run` does not start with it; `postbox check-config` names all faults";
        let faults = context.faults.iter().take(FAULTS_SHOWN);
        let faults = faults.map(|fault| Finding::problem("configuration_fault", fault, cure));
        *findings = faults.chain(silent).chain(std::mem::take(findings)).collect();
    }
    let findings = || asked.answers.iter().flat_map(|(context, of)| of.iter().map(move |finding| (*context, finding)));
    if json {
        if asked.is_answered() {
            output::json(&findings().map(|(context, finding)| OfStore::new(context, finding)).collect::<Vec<_>>());
        }
    } else {
        let shown = asked.answers.iter().flat_map(|(context, findings)| of_one(context, findings));
        output::fields(&shown.collect::<Vec<_>>());
    }
    asked.ended?;
    match findings().any(|(_, finding)| finding.severity == Severity::Problem) {
        true => Err(Failure::failed("there are problems, listed above")),
        false => Ok(()),
    }
}

async fn examine(context: &Context, service: Option<&ServiceStatus>) -> Result<Vec<Finding>, Failure> {
    let opened = async {
        let store = open_store(&context.config.store).await?;
        let created_at = validate_schema(store.as_ref()).await?;
        store.subscriptions().await?;
        Ok::<_, Error>((store, created_at))
    };
    let narrowed = service.map(|service| service.clone().of_store(context.name.as_ref()));
    match opened.await {
        Ok((store, created_at)) => match service.and_then(|it| it.of_another(context.name.as_ref(), created_at)) {
            None => look(context, store.as_ref(), narrowed).await,
            Some(another) => {
                let mut findings = look(context, store.as_ref(), None).await?;
                findings.insert(0, another);
                Ok(findings)
            }
        },
        Err(error) => Ok(status::unopened(error, &context.config, narrowed)),
    }
}

/// The lines about one store. With several stores, all that is fine is one line.
fn of_one(context: &Context, findings: &[Finding]) -> Vec<(String, String)> {
    let Some(name) = &context.name else { return fields(findings) };
    let wrong: Vec<Finding> = findings.iter().filter(|it| it.severity != Severity::Fine).cloned().collect();
    if wrong.is_empty() {
        return vec![(mark(Severity::Fine), format!("{name}: nothing is wrong"))];
    }
    let named = |(mark, text): (String, String)| {
        // A cure stands below its finding.
        let text = if text.starts_with("-> ") { text } else { format!("{name}: {text}") };
        (mark, text)
    };
    fields(&wrong).into_iter().map(named).collect()
}

async fn look(
    context: &Context,
    store: &dyn Store,
    mut service: Option<ServiceStatus>,
) -> Result<Vec<Finding>, Failure> {
    context.known_log(store).await?;
    let infos = context.registered(store).await?;
    let mut findings = Vec::new();
    let unread = context.unread(store).await.unwrap_or_else(|error| {
        findings.push(Finding::from(error));
        Vec::new()
    });
    let never_run = |name| {
        let cure = context.start_or_rename(&infos);
        Finding::problem("never_run", "it was never run, so nothing is delivered for it", cure).of(name)
    };
    let is_meant = |name: &SubscriptionName| {
        let mut configured = context.config.subscriptions.iter().filter(|it| it.subscription.name == *name);
        context.only.as_ref().is_none_or(|only| only == name) && configured.all(|it| context.means(it))
    };
    service.iter_mut().for_each(|it| it.faults.retain(|fault| fault.subscription.as_ref().is_none_or(is_meant)));
    // A subscription that was removed while its relay runs is known to the service.
    let is_known = |name: &SubscriptionName| {
        service.iter().flat_map(|it| &it.faults).any(|fault| fault.subscription.as_ref() == Some(name))
    };
    findings.extend(context.never_run(&infos).filter(|name| !is_known(name)).map(never_run));
    let is_nobody = findings.is_empty() && infos.is_empty() && unread.is_empty();
    if is_nobody && context.config.store.is_of_one_tenant() {
        findings.push(Finding::note("no_subscription", NO_SUBSCRIPTION_OF_TENANT));
    } else if is_nobody {
        let log = context.log.clone().unwrap_or_else(LogName::outbox);
        let what = format!("there is no subscription: nobody reads the {log}");
        findings.push(Finding::problem("no_subscription", what, context.reader_wanted(&log)));
    }
    // At once, so that both wait for the same lock.
    let (checked, diagnosed) = tokio::join!(
        store.check_integrity(),
        status::diagnose(store, &infos, &context.config.subscriptions, service.as_ref())
    );
    // Another failure is one of reading, which what follows reports.
    let is_misfit = |error: &Error| error.kind() == ErrorKind::Mismatch;
    findings.extend(checked.err().filter(is_misfit).map(Finding::from));
    findings.extend(diagnosed);
    // These cures, to rename, to remove and to delete, are for all tenants.
    if context.config.store.is_of_one_tenant() {
        findings.iter_mut().for_each(|it| match it.code.as_str() {
            "subscription_unconfigured" => it.cure = Some(CURE_OF_TENANT.to_owned()),
            "unrouted" => it.cure = it.cure.as_deref().map(|cure| context.cure_of_unrouted(cure)),
            _ => {}
        });
    }
    // After the subscriptions that should read it.
    findings.extend(unread.iter().map(|(log, count)| Finding::unread(log, *count, context.reader_wanted(log))));
    let is_said = |error: &Error| match error.code() {
        // A service that runs says so by itself.
        "store_read_only" => service.is_none(),
        _ => !context.config.sources.is_empty(),
    };
    findings.extend(store.check_receiving().await.err().filter(is_said).map(Finding::from));
    // A sink with a fault was read as none.
    if !context.faults.is_empty() {
        findings.retain(|it| it.code != "sink_none");
    }
    // What fails because of it has the cure to create what only has to be brought back.
    if findings.iter().any(|it| ["schema_damaged", "schema_renamed"].contains(&it.code.as_str())) {
        findings.retain(|it| !["log_unknown", "schema_missing", "schema_old"].contains(&it.code.as_str()));
    }
    Ok(findings)
}

/// Each finding, with its cure below it.
pub(crate) fn fields(findings: &[Finding]) -> Vec<(String, String)> {
    let mut fields = Vec::new();
    for finding in findings {
        let whose = finding.subscription.as_deref().unwrap_or("store");
        fields.push((mark(finding.severity), format!("{whose}: {}", finding.message)));
        fields.extend(finding.cure.iter().map(|cure| (String::new(), format!("-> {cure}"))));
    }
    fields
}

fn mark(severity: Severity) -> String {
    let mark = match severity {
        Severity::Fine => "ok",
        Severity::Note => "note",
        Severity::Problem => "PROBLEM",
    };
    format!("{mark:<7}")
}
