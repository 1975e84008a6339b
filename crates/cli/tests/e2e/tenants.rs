//! Tenants, as programs and people see them.

use anyhow::{Result, ensure};

use crate::endpoint::{Endpoint, refuses_all};
use crate::env::{FILE_SINK, Kind, TestEnv, on_both, until};

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

/// Otherwise the command would change the events of all tenants.
#[tokio::test]
async fn a_tenant_is_refused_by_a_chosen_store_that_ignores_it() -> Result<()> {
    let env = TestEnv::migrated(Kind::Sqlite).await?;
    for url in ["", "url = \"postgres://somebody@localhost/shop\"\n"] {
        std::fs::write(env.path("postbox.toml"), format!("[store]\n{url}tenant = \"acme\"\n"))?;
        for args in [&["discard", "--all"][..], &["retry", "--all", "--store", &env.url]] {
            let said = env.refuses(2, args)?;
            ensure!(said.contains("only a Postgres store separates tenants; leave it out"), "{args:?}: {said}");
        }
    }
    std::fs::write(env.path("postbox.toml"), "[store]\ntenant = \"acme\"\n")?;
    let unnamed = env.command(&["stats"]).env_remove("POSTBOX_STORE").output()?;
    let said = String::from_utf8_lossy(&unnamed.stderr);
    ensure!(unnamed.status.code() == Some(2) && said.contains("separates tenants"), "{said}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_of_one_tenant_works_with_its_own() -> Result<()> {
    let env = TestEnv::migrated(Kind::Postgres).await?;
    let [writer, operator, relay] =
        ["writer", "operator", "relay"].map(|name| format!("cli_{name}_{}", std::process::id()));
    for role in [&writer, &operator, &relay] {
        env.sql(&format!("CREATE ROLE {role} LOGIN")).await?;
    }
    let granted = ["migrate", "grants", "--writer", &writer, "--relay", &relay, "--relay", &operator];
    env.sql(&env.ok(&[&granted[..], &["--all-tenants", &relay]].concat())?).await?;

    let target = Endpoint::start(refuses_all)?;
    let subscriptions: String = ["acme", "zeta"]
        .map(|tenant| format!("{}tenant = \"{tenant}\"\ntopics = [\"t\"]\n", target.subscription(tenant)))
        .concat();
    let relay = env.as_role(&relay, &subscriptions)?;
    relay.ok(&["dispatch"])?;
    let of = |role: &str, tenant: &str| env.as_role(role, &format!("tenant = \"{tenant}\"\n"));
    let mut ids = Vec::new();
    for tenant in ["acme", "zeta"] {
        let writer = of(&writer, tenant)?;
        for _ in 0..2 {
            ids.push(writer.ok(&["send", "t", "{}", "--tenant", tenant])?.trim().to_owned());
        }
        let complaint = writer.refuses(1, &["send", "t", "{}", "--tenant", "third"])?;
        ensure!(complaint.contains("postbox.tenant"), "{complaint}");
        writer.refuses(1, &["send", "t", "{}"])?;
    }
    ensure!(relay.dispatch(&[])? == "dispatched=0 failed=0 dead=4");

    let acme = of(&operator, "acme")?;
    ensure!(acme.ok(&["stats"])? == "pending=0 dispatched=0 dead=2 total=2\n");
    let listed = acme.json(&["list", "--state", "dead", "--json"])?;
    ensure!(listed.as_array().map(Vec::len) == Some(2), "{listed}");
    ensure!(acme.ok(&["show", &ids[0]])?.contains("http_422"));
    for verb in ["show", "retry", "replay", "discard"] {
        acme.refuses(1, &[verb, &ids[2]])?;
    }
    let known = acme.ok(&["send", "t", "{}", "--tenant", "acme", "--id", &ids[0]])?;
    ensure!(known.trim() == ids[0], "its own is there already: {known}");
    let complaint = acme.refuses(1, &["send", "t", "{}", "--tenant", "acme", "--id", &ids[2]])?;
    ensure!(complaint.contains("id"), "another's is not its own: {complaint}");
    let found = acme.said(&["doctor"])?;
    ensure!(found.contains("acme") && !found.contains("zeta"), "{found}");
    ensure!(found.contains("not in the configuration") && found.contains("for all tenants"), "{found}");
    ensure!(!found.contains("postbox subscription"), "it may neither rename nor remove one: {found}");
    ensure!(acme.ok(&["retry", "--all"])? == "retried=2\n");
    ensure!(acme.ok(&["discard", "--all"])? == "discarded=2\n");
    ensure!(relay.ok(&["stats"])? == "pending=0 dispatched=0 dead=2 total=4\n", "the other's stay dead");
    let complaint = acme.refuses(1, &["prune", "--older-than", "0s"])?;
    ensure!(complaint.contains("all tenants"), "{complaint}");
    acme.config(&format!("tenant = \"acme\"\n{FILE_SINK}"))?;
    for command in ["check-config", "dispatch", "run"] {
        let complaint = acme.refuses(2, &[command])?;
        ensure!(complaint.contains("store.tenant: ") && complaint.contains("remove `tenant` from"), "{complaint}");
    }
    ensure!(acme.ok(&["stats"])? == "pending=0 dispatched=0 dead=0 total=2\n", "to look is possible");
    of(&writer, "acme")?.ok(&["send", "u", "{}", "--tenant", "acme"])?;
    let acme = of(&operator, "acme")?;
    // A transaction of another test may be older.
    let found = until("an event that nobody wants", async || {
        relay.output(&["dispatch"])?;
        let found = acme.said(&["doctor"])?;
        Ok(found.contains("no subscription wants").then_some(found))
    })
    .await?;
    ensure!(found.contains("for all tenants can delete them") && !found.contains("postbox prune"), "{found}");
    let complaint = env.as_role(&operator, FILE_SINK)?.refuses(1, &["dispatch"])?;
    ensure!(complaint.contains("(tenant_not_named)") && !complaint.contains("remove `tenant`"), "{complaint}");
    for role in [&writer, &operator] {
        env.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await?;
    }
    Ok(())
}

/// Otherwise a command for one tenant would change the events of all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_is_refused_to_a_role_that_no_policy_limits() -> Result<()> {
    let target = Endpoint::start(refuses_all)?;
    let subscription = target.subscription("out");
    let env = TestEnv::with(Kind::Postgres, &subscription).await?;
    let mut ids = Vec::new();
    for tenant in ["acme", "bond"] {
        ids.push(env.ok(&["send", "t", "{}", "--tenant", tenant])?.trim().to_owned());
    }
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=2");
    let role = format!("cli_of_all_{}", std::process::id());
    env.sql(&format!("CREATE ROLE {role} LOGIN")).await?;
    let granted = ["migrate", "grants", "--relay", &role, "--all-tenants", &role];
    let of_acme = "tenant = \"acme\"\n";
    env.config(of_acme)?;
    // The superuser before there are policies, and after.
    refuses_its_tenant(&env, &ids)?;
    env.sql(&env.ok(&granted)?).await?;
    refuses_its_tenant(&env, &ids)?;
    refuses_its_tenant(&env.as_role(&role, of_acme)?, &ids)?;
    // Whoever migrates and prints the policies need not be limited by them.
    for args in [&["migrate", "up"][..], &["migrate", "validate"], &granted] {
        env.ok(args)?;
    }
    env.config(&subscription)?;
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=0 dead=2 total=2\n", "nothing was changed");
    env.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await
}

fn refuses_its_tenant(env: &TestEnv, ids: &[String]) -> Result<()> {
    for args in [
        &["stats"][..],
        &["list"],
        &["show", &ids[1]],
        &["discard", "--all"],
        &["retry", "--topic", "t", "--subscription", "out"],
        &["pause", "out", "--why", "so"],
        &["send", "t", "{}", "--tenant", "acme"],
    ] {
        let complaint = env.refuses(1, args)?;
        ensure!(complaint.contains("(tenant_not_limited)"), "{args:?}: {complaint}");
        ensure!(complaint.contains("remove `tenant` from [store]"), "{args:?}: {complaint}");
    }
    let checked = env.output(&["check-config", "--connect"])?;
    let complaint = String::from_utf8_lossy(&checked.stderr);
    ensure!(checked.status.code() == Some(1) && complaint.contains("(tenant_not_limited)"), "{complaint}");
    let found = env.said(&["doctor", "--json"])?;
    ensure!(found.contains("\"tenant_not_limited\""), "{found}");
    Ok(())
}
