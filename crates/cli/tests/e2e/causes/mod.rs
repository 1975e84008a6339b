//! Causes of late events, planted one by one: the first finding of `postbox doctor` must be the
//! cause.
//!
//! Code, reason, severity and the words of the cure that name the action are compared; message and
//! cure are printed for a person to read (`--no-capture`).

#![allow(clippy::print_stderr, reason = "the sentences are for a person to judge")]

mod destination;
mod flow;
mod incoming;
mod many;
mod nobody;
mod store;

use std::any::Any;

use anyhow::{Context as _, Result, ensure};
use jiff::{Span, Timestamp};
use serde_json::Value;

use crate::endpoint::{Endpoint, refuses_all};
use crate::env::{FILE_SINK, Kind, Served, TestEnv, until};

/// A store with a planted cause.
pub(crate) struct Planted {
    env: TestEnv,
    config: String,
    served: Vec<Served>,
    /// What must stay alive until the doctor has run.
    kept: Vec<Box<dyn Any>>,
}

impl Planted {
    async fn new(kind: Kind, config: impl Into<String>) -> Result<Self> {
        let config = config.into();
        let env = TestEnv::with(kind, &config).await?;
        Ok(Self::of(env, config))
    }

    fn of(env: TestEnv, config: impl Into<String>) -> Self {
        Self { env, config: config.into(), served: Vec::new(), kept: Vec::new() }
    }

    /// Inserts events that arrived evenly over the last half minute.
    async fn arrived(self, events: usize, key: impl Fn(usize) -> String) -> Result<Self> {
        let now = Timestamp::now();
        let rows = (0..events).map(|n| {
            let ms = 30_000 * (events - n) / events;
            let at = now - Span::new().milliseconds(ms as i64);
            let at = match self.env.kind {
                Kind::Sqlite => at.as_microsecond().to_string(),
                Kind::Postgres => format!("'{at}'"),
            };
            format!("('order.placed', '{}', '{{\"n\":{n}}}', {at})", key(n))
        });
        let rows = rows.collect::<Vec<_>>().join(",");
        self.env.sql(&format!("INSERT INTO OUTBOX (topic, key, payload, created_at) VALUES {rows}")).await?;
        Ok(self)
    }

    async fn three(self) -> Result<Self> {
        self.env.insert_three().await?;
        Ok(self)
    }

    /// Runs `postbox run`, and writes its address into the configuration.
    async fn served(mut self) -> Result<Self> {
        let served = self.env.serve().await?;
        self.env.config(&format!("{}\n[server]\nlisten = {:?}\n", self.config, served.address))?;
        self.served.push(served);
        Ok(self)
    }

    fn keeping(mut self, it: impl Any) -> Self {
        self.kept.push(Box::new(it));
        self
    }
}

/// The first finding of at least this severity: a cause must come before its consequences.
fn first(findings: &Value, severity: &str) -> Option<Value> {
    let rank = |it: &str| ["fine", "note", "problem"].iter().position(|known| *known == it);
    let is_meant = |it: &&Value| it["severity"].as_str().and_then(rank) >= rank(severity);
    findings.as_array()?.iter().find(is_meant).cloned()
}

/// Plants the cause and waits until the doctor reports it, because its evidence takes a moment to
/// appear. `wanted` is the code, or code and reason. `action` is part of the cure; empty: there may
/// be none.
async fn named<F: Future<Output = Result<Planted>>>(
    kind: Kind,
    plant: impl Fn(Kind) -> F,
    severity: &str,
    wanted: &str,
    action: &str,
) -> Result<()> {
    let planted = plant(kind).await?;
    let mut said = Value::Null;
    let look = async || {
        said = serde_json::from_slice(&planted.env.output(&["doctor", "--json"])?.stdout)?;
        let found = first(&said, severity).filter(|it| it["severity"] == severity && is(it, wanted));
        anyhow::Ok(found)
    };
    let found = until(wanted, look).await.with_context(|| format!("{said:#}"))?;
    eprintln!("{wanted} ({severity}): {}\n  -> {}", found["message"], found["cure"]);
    let names_it = found["cure"].as_str().is_some_and(|cure| cure.contains(action));
    ensure!(names_it || (action.is_empty() && severity == "note"), "its cure is not {action:?}: {found}");
    for served in planted.served {
        served.kill().await?;
    }
    Ok(())
}

/// Several causes are several findings, in order within each subscription; and the doctor changes
/// nothing.
async fn several_causes_are_several_findings(kind: Kind) -> Result<()> {
    let refusing = Endpoint::start(refuses_all)?;
    let config = format!("{}on_dead = \"halt\"\n{}", refusing.subscription("hooks"), FILE_SINK);
    let planted = Planted::new(kind, config).await?.three().await?;
    planted.env.dispatch(&[])?;
    planted.env.insert_three().await?;
    planted.env.ok(&["pause", "hooks", "--why", "billing is migrating"])?;
    let before = planted.env.snapshot().await?;
    let said: Value = serde_json::from_slice(&planted.env.output(&["doctor", "--json"])?.stdout)?;
    ensure!(planted.env.snapshot().await? == before, "it changed something");
    let of = |name: &str| -> Vec<&str> {
        let its =
            said.as_array().into_iter().flatten().filter(|it| it["subscription"] == name && it["severity"] != "fine");
        its.filter_map(|it| it["code"].as_str()).collect()
    };
    ensure!(of("hooks") == ["paused", "halted", "dead"], "{said:#}");
    ensure!(of("out") == ["not_driven"], "{said:#}");
    Ok(())
}

/// This includes a removed subscription that only the service still knows.
async fn a_look_at_one_subscription_says_nothing_of_others(kind: Kind) -> Result<()> {
    let two = FILE_SINK.to_owned() + &FILE_SINK.replace("out", "other");
    let planted = Planted::new(kind, two).await?.served().await?;
    planted.served[0].logged("lane taken", 2).await?;
    planted.env.ok(&["subscription", "remove", "other", "--yes"])?;
    let said = async || anyhow::Ok(Some(planted.env.said(&["doctor"])?).filter(|it| it.contains("other was removed")));
    until("the service knows", said).await?;
    let said = planted.env.said(&["doctor", "--subscription", "out"])?;
    ensure!(said.contains("out: ") && !said.contains("other"), "{said}");
    Ok(())
}

crate::env::on_both!(several_causes_are_several_findings, a_look_at_one_subscription_says_nothing_of_others);

fn is(finding: &Value, wanted: &str) -> bool {
    let (code, reason) = wanted.split_once(' ').map_or((wanted, None), |(code, reason)| (code, Some(reason)));
    finding["code"] == code && reason.is_none_or(|reason| finding["reason"] == reason)
}

/// Causes by the store they are planted in, with the expected finding of each, and a part of its
/// cure.
macro_rules! causes {
    ($($kind:ident $name:ident $severity:literal $wanted:literal $action:literal;)*) => {
        $($crate::causes::causes!(@ $kind $name $severity $wanted $action);)*
    };
    (@ both $name:ident $severity:literal $wanted:literal $action:literal) => {
        mod $name {
            $crate::env::cases! {
                on_sqlite => crate::causes::named(crate::env::Kind::Sqlite, super::$name, $severity, $wanted, $action);
                on_postgres =>
                    crate::causes::named(crate::env::Kind::Postgres, super::$name, $severity, $wanted, $action);
            }
        }
    };
    (@ $kind:ident $name:ident $severity:literal $wanted:literal $action:literal) => {
        mod $name {
            $crate::env::cases! {
                on_one => crate::causes::named(crate::env::Kind::$kind, super::$name, $severity, $wanted, $action);
            }
        }
    };
}
use causes;
