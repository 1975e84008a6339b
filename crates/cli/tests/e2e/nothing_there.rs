//! What list commands print when there is nothing: `[]` if the stores answered, and nothing if they
//! could not.

use anyhow::{Context as _, Result, ensure};

use crate::env::{Kind, TestEnv, on_both};

const LISTS: [&[&str]; 6] = [
    &["list", "--state", "dead"],
    &["list", "--state", "pending"],
    &["list", "--state", "unrouted"],
    &["list", "--state", "conflict"],
    &["stats"],
    &["subscription", "list"],
];

/// A folder whose configuration names these stores; a store without a name is the only one.
fn stores(stores: &[(&str, &TestEnv)]) -> Result<TestEnv> {
    let env = TestEnv::on(Kind::Sqlite, String::new())?;
    let section = |(name, store): &(&str, &TestEnv)| match *name {
        "" => format!("[store]\nurl = {:?}\n", store.url),
        name => format!("[stores.{name}]\nurl = {:?}\n", store.url),
    };
    std::fs::write(env.path("postbox.toml"), stores.iter().map(section).collect::<String>())?;
    Ok(env)
}

async fn every_list_of_nothing_is_the_same(kind: Kind) -> Result<()> {
    let (made, other) = (TestEnv::migrated(kind).await?, TestEnv::migrated(kind).await?);
    let (missing, too) = (TestEnv::empty(kind).await?, TestEnv::empty(kind).await?);
    for (all, code, json, whose) in [
        (&[("", &made)][..], 0, "[]\n", None),
        (&[("a", &made), ("b", &other)], 0, "[]\n", None),
        (&[("a", &made), ("b", &missing)], 1, "[]\n", Some("b: ")),
        (&[("a", &missing), ("b", &too)], 1, "", Some("b: ")),
        (&[("", &missing)], 1, "", Some("migrate up")),
    ] {
        let env = stores(all)?;
        for list in LISTS {
            for args in [[list, &["--json"]].concat(), list.to_vec()] {
                let output = env.output(&args)?;
                let (said, why) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
                let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
                let context = || format!("{args:?} of {names:?}: {} {said:?} {why:?}", output.status);
                ensure!(output.status.code() == Some(code), context());
                // Sums are not a list.
                let expected = if args.contains(&"--json") { json } else { "" };
                ensure!(said == expected || args == ["stats"], context());
                ensure!(whose.is_none_or(|whose| why.contains(whose)), context());
            }
        }
    }
    Ok(())
}

/// A subscription that never ran is named on standard error; the list is printed all the same.
async fn a_subscription_that_never_ran_is_named_beside_the_list(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, crate::env::FILE_SINK).await?;
    env.insert_three().await?;
    for list in LISTS.into_iter().filter(|list| *list != LISTS[3]) {
        let output = env.output(&[list, &["--json"]].concat())?;
        let (said, why) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
        ensure!(output.status.success(), "{list:?}: {} {why}", output.status);
        let listed: serde_json::Value = serde_json::from_str(&said)?;
        // The counts have a line for the log that no subscription reads.
        let expected = if *list == ["stats"] { 1 } else { 0 };
        ensure!(listed.as_array().context("a list")?.len() == expected, "{list:?}: {said}");
        ensure!(why.contains("out was never run") && why.contains("postbox run"), "{list:?}: {why}");
    }
    for args in [&["list", "--state", "pending"][..], &["list", "--state", "pending", "--json"]] {
        let why = String::from_utf8(env.output(args)?.stderr)?;
        ensure!(
            why.contains("3 event(s) are not shown") && !why.contains("no event is in the state"),
            "{args:?}: {why}"
        );
    }
    Ok(())
}

on_both!(every_list_of_nothing_is_the_same, a_subscription_that_never_ran_is_named_beside_the_list);
