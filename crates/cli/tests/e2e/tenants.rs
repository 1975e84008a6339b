//! Tenants, as a program and a person meet them.

use anyhow::{Result, ensure};

use crate::endpoint::{Endpoint, refuses_all};
use crate::env::{Kind, TestEnv, on_both};

async fn a_tenant_narrows_what_is_meant(kind: Kind) -> Result<()> {
    let target = Endpoint::start(refuses_all)?;
    let env = TestEnv::with(kind, &target.subscription("out")).await?;
    for tenant in ["acme", "other", "other"] {
        env.ok(&["send", "t", "{}", "--tenant", tenant])?;
    }
    let complaint = env.refuses(2, &["send", "t", "{}", "--tenant", "a\nb"])?;
    ensure!(complaint.contains("tenant_invalid"), "{complaint}");
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=3");
    let listed = env.json(&["list", "--state", "dead", "--tenant", "acme", "--json"])?;
    ensure!(listed.as_array().map(Vec::len) == Some(1) && listed[0]["event"]["tenant"] == "acme", "{listed}");
    ensure!(env.ok(&["retry", "--tenant", "acme", "--dry-run"])?.contains("1"));
    ensure!(env.ok(&["discard", "--tenant", "other"])? == "discarded=2\n");
    ensure!(env.ok(&["retry", "--tenant", "acme"])? == "retried=1\n");
    ensure!(env.ok(&["stats"])? == "pending=1 dispatched=0 dead=0 total=3\n");
    Ok(())
}

on_both!(a_tenant_narrows_what_is_meant);
