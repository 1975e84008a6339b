//! Why events are late: `postbox doctor`. It reads the store, so it works while relays run
//! elsewhere, and uses the status of a running service if there is one.

mod asked;
mod concluded;
mod destination;
mod finding;
mod speed;

use futures::future::join_all;
use postbox_core::{Blocker, Error, Hold, Result, Store, SubscriptionInfo, SubscriptionName};
use tokio::time::{Instant, timeout_at};

use self::asked::{Known, LOOK};
use self::concluded::conclude;
pub(crate) use self::destination::is_unreachable;
pub use self::finding::{Finding, Severity};
use super::stats::{STATS_WAIT, StatsJson, stats, too_slow};
use super::unrouted::{UnroutedLog, unrouted};
use super::{Fault, ServiceStatus, StormJson};
use crate::config::{Config, SubscriptionConfig};
use crate::text::{cut, grouped, span};

/// Returns all findings, causes before symptoms: first the store, then each subscription, then the
/// parts beside them and the sources. `configured` is what the local configuration has for these
/// subscriptions.
pub async fn diagnose(
    store: &dyn Store,
    infos: &[SubscriptionInfo],
    configured: &[SubscriptionConfig],
    service: Option<&ServiceStatus>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let deadline = Instant::now() + STATS_WAIT;
    let blockers = timeout_at(deadline, store.blockers()).await.unwrap_or_else(|_| Err(too_slow()));
    let (mut standby, locks): (Vec<_>, Vec<_>) = blockers.iter().flatten().partition(|it| it.hold == Hold::Standby);
    // One standby is the cause of all of them.
    standby.truncate(1);
    findings.extend(standby.into_iter().chain(locks).map(blocker));
    findings.extend(service.iter().flat_map(|service| of_service(service, infos)).map(restarted_to_log_in));
    let counts = async {
        let mut all = stats(store, infos, deadline).await;
        count_alone(store, infos, &mut all, deadline).await;
        all
    };
    let others = async {
        let unrouted = unrouted(store, infos).await?;
        let mut others: Vec<Finding> = unrouted.iter().map(UnroutedLog::finding).collect();
        others.extend(conflicts(store).await?);
        Ok::<_, Error>(others)
    };
    // At once, so that both wait for the same lock.
    let (all, others) = tokio::join!(counts, timeout_at(deadline, others));
    // At once and with a time limit of their own: a distant database takes long for each. The
    // store's connections bound how many run.
    let deadline = Instant::now() + STATS_WAIT;
    let concluded = join_all(infos.iter().zip(&all).map(|(info, counted)| async move {
        let stats = match counted {
            Ok(stats) => stats,
            Err(error) => return vec![uncounted(error).of(&info.name)],
        };
        let config = configured.iter().find(|config| config.subscription.name == info.name);
        let (known, failed) = Known::ask(store, (info, stats), config, service, deadline).await;
        let mut found = conclude(&known, service);
        found.extend(failed.map(|error| Finding::from(error).of(&info.name)));
        found
    }));
    findings.extend(concluded.await.into_iter().flatten());
    match others.unwrap_or_else(|_| Err(too_slow())) {
        Ok(others) => findings.extend(others),
        Err(error) => findings.push(Finding::from(error)),
    }
    findings.extend(service.iter().flat_map(|service| of_parts(service)));
    findings.extend(service.iter().flat_map(|service| service.storms.iter().map(storm)));
    findings
}

/// The findings if the store could not be opened. What a running service says comes first, because
/// it may have had the store open. If it says that the store's file was moved or deleted, the cure
/// of the open error (create a schema) would destroy what can still be saved.
///
/// The service must be narrowed to this store. It may be that of another project, with other
/// subscriptions and sources than `config`, or with a schema where this store has none.
pub fn unopened(error: Error, config: &Config, service: Option<ServiceStatus>) -> Vec<Finding> {
    let has_no_schema = error.code() == "schema_missing";
    let is_another = |it: &ServiceStatus| {
        has_no_schema && !it.stores.is_empty() && !it.faults.iter().any(|fault| fault.code == "store_replaced")
    };
    let mut service = service.filter(|it| !is_another(it));
    let is_ours = |fault: &Fault| {
        let mut subscriptions = config.subscriptions.iter().map(|it| &it.subscription.name);
        let mut sources = config.sources.iter().map(|it| &it.name);
        fault.subscription.as_ref().is_none_or(|name| subscriptions.any(|it| it == name))
            && fault.source.as_ref().is_none_or(|name| sources.any(|it| it == name))
    };
    service.iter_mut().for_each(|it| it.faults.retain(is_ours));
    let mut findings: Vec<Finding> = service.iter().flat_map(|service| of_service(service, &[])).collect();
    if !findings.iter().any(|it| it.code == "store_replaced") {
        findings.push(Finding::from(error));
    }
    findings
}

/// The code of a store that refuses the user or the password.
const LOGIN_REFUSED: &str = "login_refused";
/// The cure if it refuses the service's, and not this command's.
const RESTART: &str = "restart the service with the user and password that this command has: it reads its configuration, and `env:` variables, at its start only";

/// What the service reports, if the store is open here: its configuration is right, and the service
/// has an older one.
fn restarted_to_log_in(finding: Finding) -> Finding {
    if finding.code == LOGIN_REFUSED { finding.cure(RESTART) } else { finding }
}

/// A subscription whose events could not be counted.
fn uncounted(error: &Error) -> Finding {
    let found = Finding::failed(error.code(), &format!("its events could not be counted: {}", error.message()));
    let cure = "end what keeps the database busy, or wait; `postbox stats` shows when the counts are back";
    if found.cure.is_none() { found.cure(cure) } else { found }
}

/// Counts each estimated subscription again, alone. Several share what one count may cost, and an
/// estimate of zero must not hide a cause.
async fn count_alone(
    store: &dyn Store,
    infos: &[SubscriptionInfo],
    counted: &mut [Result<StatsJson>],
    deadline: Instant,
) {
    if infos.len() < 2 {
        return;
    }
    for (info, counted) in infos.iter().zip(counted) {
        if counted.as_ref().is_ok_and(|stats| stats.is_estimate)
            && let Some(Ok(alone)) = stats(store, std::slice::from_ref(info), deadline).await.pop()
        {
            *counted = Ok(alone);
        }
    }
}

/// What Postgres shows of a session to a role without a right to see it.
const HIDDEN: &str = "<insufficient privilege>";
/// How to see it.
const HIDDEN_WHY: &str = "GRANT pg_read_all_stats TO the role of this store shows what it runs";

/// Somebody holds a lock that others wait for, waits for a standby with its locks, holds the
/// database's horizon, or lets the write-ahead log grow.
fn blocker(blocker: &Blocker) -> Finding {
    let Blocker { holder, program, query, tables, waiting, waited, end, hold } = blocker;
    let (program, query) = (cut(program, 60), cut(query, 80));
    let who = match query.as_str() {
        "" => format!("{holder} ({program})"),
        HIDDEN => format!("{holder} ({program}; {HIDDEN_WHY})"),
        query => format!("{holder} ({program}: {query})"),
    };
    let tables = tables.join(", ");
    let lasted = if waited.is_zero() { String::new() } else { format!(" for {}", span(*waited)) };
    match hold {
        Hold::Standby => Finding::problem(
            "standby_awaited",
            format!("{who} has waited for the synchronous standby{lasted}, with locks on {tables}"),
            "start the standby, or take it out of synchronous_standby_names and reload; do not end the session",
        ),
        Hold::Lock => Finding::problem(
            "session_blocks",
            format!("{who} holds a lock on {tables}, and {waiting} session(s) have waited for it{lasted}"),
            format!("let it end, or end it: {end}"),
        ),
        Hold::Horizon { has_written } => {
            let kept = match has_written {
                true => "what was committed since is neither deleted nor found unrouted, and VACUUM keeps dead rows",
                false => "VACUUM keeps rows that were deleted since",
            };
            let what = format!("{who} has held the database's horizon{lasted}: until it ends, {kept}");
            let cure = format!("let it end, or end it if nobody needs it: {end}");
            Finding::note("horizon_held", what).cure(cure)
        }
        Hold::Wal { bytes } => Finding::problem(
            "wal_grows",
            format!(
                "{holder} has {} MB: no checkpoint empties it while a read transaction is open, or while many overlap, \
                 and it grows with every write until the disk is full",
                grouped(bytes / 1_000_000)
            ),
            format!(
                "end such a transaction: a cursor that is not read to its end, or a shell with an open BEGIN (a backup \
                 ends by itself); the programs that have the file open: fuser -v {holder}"
            ),
        ),
    }
}

/// The cure for a source that fails with this code.
fn cure_of_source(code: &str) -> &'static str {
    match code {
        "mqtt_message_unreadable" | "rabbitmq_message_unreadable" => {
            "the broker is up, but one of its messages cannot be read: the service's log says how to remove it"
        }
        _ if code.ends_with("_not_permitted") || code.ends_with("_denied") => {
            "grant its user the rights that the guide lists; the service's log says at `source failed` which one is \
             missing; the source is retried by itself"
        }
        _ => "run `postbox check-config --connect`, which says what is wrong; the source is retried by itself",
    }
}

/// The parts of the service that fail beside its work.
fn of_parts(service: &ServiceStatus) -> impl Iterator<Item = Finding> {
    service.faults.iter().filter(|fault| !fault.stops_work()).map(|fault| {
        let (code, what) = match fault.part.as_deref() {
            Some(Fault::RETENTION) => ("retention_failing", "retention"),
            _ => ("unrouted_failing", "the search for events that no subscription wants"),
        };
        let found = Finding::failed(code, &format!("{what}: {}", fault.what)).reason(&fault.code);
        let cure = "the service's log says more; it is tried again by itself";
        if found.cure.is_none() { found.cure(cure) } else { found }
    })
}

/// What the service reports about the store, its sources, and subscriptions that no longer exist.
fn of_service(service: &ServiceStatus, infos: &[SubscriptionInfo]) -> Vec<Finding> {
    let is_known = |name: &SubscriptionName| infos.iter().any(|info| info.name == *name);
    let is_meant = |fault: &&Fault| fault.stops_work() && !fault.subscription.as_ref().is_some_and(is_known);
    let others = service.faults.iter().filter(is_meant);
    let finding = |fault: &Fault| match (&fault.source, &fault.subscription) {
        (Some(source), _) => Finding::problem(
            "source_failing",
            format!("the source {source}: {}", fault.what),
            match fault.part.as_deref() {
                Some(Fault::STORING) => "the service's log says at `store failed` or `store unavailable` what is wrong",
                _ => cure_of_source(&fault.code),
            },
        )
        .reason(&fault.code),
        (None, Some(name)) => {
            Finding::failed(&fault.code, &format!("the service at {}: {}", service.address, fault.what)).of(name)
        }
        (None, None) => {
            Finding::failed(&fault.code, &format!("the service at {}: the store: {}", service.address, fault.what))
        }
    };
    others.map(finding).collect()
}

/// Rejected messages. Their senders believe that they arrived.
async fn conflicts(store: &dyn Store) -> Result<Option<Finding>> {
    let conflicts = store.conflicts(LOOK).await?;
    let Some(last) = conflicts.first() else { return Ok(None) };
    let most = if conflicts.len() == LOOK { "at least " } else { "" };
    let count = conflicts.len();
    let what = format!(
        "{most}{count} message(s) with a known id and another body were rejected, the last from {}",
        last.source
    );
    Ok(Some(Finding::note("message_conflict", what).cure("postbox list --state conflict")))
}

/// A sender that repeats its messages.
fn storm(storm: &StormJson) -> Finding {
    let (repeats, arrivals) = (grouped(storm.repeats), grouped(storm.arrivals));
    let what = format!(
        "replay storm: {repeats} of the {arrivals} messages of the last minute from {} are repetitions; they are not stored again",
        storm.source
    );
    let cure = "ask the sender why: it does not get the answers, or somebody replays captured messages";
    Finding::problem("replay_storm", what, cure)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_holds_the_horizon_is_a_note_that_says_what_it_keeps() {
        let held = |has_written| {
            blocker(&Blocker {
                holder: "the prepared transaction 'x'".to_owned(),
                program: "role app, database shop".to_owned(),
                query: String::new(),
                tables: Vec::new(),
                waiting: 0,
                waited: Duration::from_secs(720),
                end: "ROLLBACK PREPARED 'x'".to_owned(),
                hold: Hold::Horizon { has_written },
            })
        };
        let found = held(true);
        assert_eq!((found.code.as_str(), found.severity), ("horizon_held", Severity::Note));
        let who = "the prepared transaction 'x' (role app, database shop) has held the database's horizon for 12m 0s: ";
        assert!(found.message.starts_with(who) && found.message.contains("unrouted"), "{found:?}");
        assert!(found.cure.is_some_and(|cure| cure.ends_with(": ROLLBACK PREPARED 'x'")));
        assert!(!held(false).message.contains("unrouted"), "a snapshot only keeps dead rows");
    }

    #[test]
    fn a_statement_that_is_hidden_says_how_to_see_it() {
        let found = |query: &str| {
            blocker(&Blocker {
                holder: "session 7".to_owned(),
                program: "ops".to_owned(),
                query: query.to_owned(),
                tables: vec!["outbox".to_owned()],
                waiting: 1,
                waited: Duration::from_secs(2),
                end: "SELECT pg_terminate_backend(7)".to_owned(),
                hold: Hold::Lock,
            })
        };
        assert!(found("<insufficient privilege>").message.contains("(ops; GRANT pg_read_all_stats TO"));
        assert!(found("BEGIN").message.starts_with("session 7 (ops: BEGIN) holds a lock on outbox"));
    }

    /// The store is open here, so this configuration is right: to correct it would change nothing.
    #[test]
    fn a_service_with_a_former_password_is_to_be_restarted() {
        let cure = |code: &str| {
            let found = Finding::failed(code, "the service at A: the store: refused; correct the password");
            restarted_to_log_in(found).cure.unwrap_or_default()
        };
        assert!(cure("login_refused").starts_with("restart the service"));
        assert_eq!(cure("store_unreachable"), "correct the password");
    }

    #[test]
    fn a_part_that_fails_is_a_problem_with_the_cure_of_its_reason() {
        let fault = |part: &str, what: &str| Fault {
            part: Some(part.to_owned()),
            source: (part == Fault::STORING).then(|| "partner".parse().expect("a name")),
            code: "reason".to_owned(),
            what: what.to_owned(),
            ..Fault::default()
        };
        let held = "it has failed: it is held; drop the foreign key";
        let service = ServiceStatus {
            version: String::new(),
            address: ([127, 0, 0, 1], 8600).into(),
            ready: true,
            faults: vec![fault("retention", held), fault("unrouted", "it has failed"), fault("storing", "not stored")],
            work: Vec::new(),
            storms: Vec::new(),
            stores: Vec::new(),
        };
        let found: Vec<Finding> = of_parts(&service).collect();
        let codes: Vec<&str> = found.iter().map(|it| it.code.as_str()).collect();
        assert_eq!(codes, ["retention_failing", "unrouted_failing"]);
        assert_eq!(found[0].cure.as_deref(), Some("drop the foreign key"));
        assert!(found.iter().all(|it| it.severity == Severity::Problem && it.cure.is_some()), "{found:?}");
        let of_work = of_service(&service, &[]);
        assert_eq!(of_work.len(), 1, "{of_work:?}");
        assert!(of_work[0].code == "source_failing" && of_work[0].cure.as_deref().unwrap_or_default().contains("log"));
    }

    #[test]
    fn a_message_that_cannot_be_read_is_no_broker_that_is_down() {
        for code in ["mqtt_message_unreadable", "rabbitmq_message_unreadable"] {
            assert!(cure_of_source(code).starts_with("the broker is up"), "{code}");
        }
        assert!(cure_of_source("redis_connect_failed").contains("check-config --connect"));
    }
}
