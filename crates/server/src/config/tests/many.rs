//! Several stores in one file.

use postbox_core::StoreName;

use super::*;

const TWO: &str = "[stores.a]\nurl = \"sqlite:a.db\"\n[stores.b]\nurl = \"sqlite:b.db\"\n";

/// The subscriptions and sources of each store.
fn shares(text: &str) -> Vec<(String, Vec<String>)> {
    let share = |(name, config): (Option<StoreName>, Config)| {
        let subscriptions = config.subscriptions.iter().map(|it| it.subscription.name.to_string());
        let sources = config.sources.iter().map(|it| it.path().unwrap_or_else(|| it.name.to_string()));
        (name.map_or_else(String::new, |name| name.to_string()), subscriptions.chain(sources).collect())
    };
    parse(text).expect("no faults").per_store().into_iter().map(share).collect()
}

#[test]
fn each_store_has_what_is_not_said_to_be_of_others() {
    let webhook = format!("type = \"webhook\"\nscheme = \"standard\"\nsecret = \"{KEY}\"\n");
    let more = format!(
        "[subscriptions.all]\n[subscriptions.one]\nstores = [\"b\"]\n[sources.in]\n{webhook}\
         [sources.one]\n{webhook}stores = [\"a\"]\n"
    );
    let of = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    assert_eq!(
        shares(&(TWO.to_owned() + &more)),
        [("a".to_owned(), of(&["all", "/in/a/in", "/in/a/one"])), ("b".to_owned(), of(&["all", "one", "/in/b/in"]))]
    );
    // A single store has no name, and none in its paths.
    let alone = format!("[store]\nurl = \"sqlite:a.db\"\n[subscriptions.all]\n[sources.in]\n{webhook}");
    assert_eq!(shares(&alone), [(String::new(), of(&["all", "/in/in"]))]);
}

#[test]
fn one_store_and_several_in_one_file_is_a_fault_with_its_cure() {
    let message = fault(&("[store]\nurl = \"sqlite:c.db\"\n".to_owned() + TWO));
    assert!(message.contains(":1: ") && message.contains("write [stores.NAME] instead of [store]"), "{message}");
}

#[test]
fn a_store_of_many_has_a_url_of_its_own() {
    let message = fault("[stores.a]\n");
    assert!(message.contains("stores.a has no url; write url = \"env:"), "{message}");
    let twice = "[stores.a]\nurl = \"env:DATABASE_URL\"\n[stores.b]\nurl = \"env:DATABASE_URL\"\n";
    let message = fault(twice);
    assert!(message.contains(":3: ") && message.contains("stores.b is the same store as stores.a"), "{message}");
    assert!(!message.contains("hunter2"), "{message}");
    // Several schemas in one database, one for each tenant.
    parse(&twice.replace("[stores.b]\n", "[stores.b]\nschema = \"other\"\n")).expect("no faults");
    let message = fault("[stores.\"a b\"]\nurl = \"sqlite:a.db\"\n");
    assert!(message.contains("stores.a b: "), "{message}");
}

#[test]
fn a_store_that_is_not_there_is_named_with_the_nearest() {
    let of = |stores: &str| format!("[subscriptions.x]\nstores = {stores}\n");
    let message = fault(&("[stores.acme]\nurl = \"sqlite:a.db\"\n".to_owned() + &of("[\"acne\"]")));
    assert!(message.contains(":4: ") && message.contains("did you mean `acme`?"), "{message}");
    let message = fault(&of("[\"a\"]"));
    assert!(message.contains("subscriptions.x.stores: there is no [stores.a]; leave it out"), "{message}");
    let message = fault(&(TWO.to_owned() + &of("[]")));
    assert!(message.contains("is empty; name a store, or leave it out for all"), "{message}");
}

#[test]
fn a_rate_is_shared_with_a_subscription_that_has_one() {
    let of = |named: &str, rate: &str| {
        let shares = format!("[subscriptions.b]\nstores = [\"b\"]\nrate_of = {named:?}\n{rate}");
        format!("{TWO}[subscriptions.a]\nstores = [\"a\"]\nrate = \"50/s\"\n[subscriptions.none]\n{shares}")
    };
    for (named, rate, cure) in [
        ("c", "", "there is no [subscriptions.c]; known here: "),
        ("b", "", "subscriptions.b shares a rate itself; name the subscription that has the rate"),
        ("none", "", "subscriptions.none has no rate to share; write one there"),
        ("a", "rate = \"5/s\"\n", "cannot be used together with subscriptions.b.rate; remove one of them"),
    ] {
        let message = fault(&of(named, rate));
        assert!(message.contains("subscriptions.b.rate_of") && message.contains(cure), "{message}");
    }
    // Where the named one is not: its relays need the rate itself.
    let shares = parse(&of("a", "")).expect("no faults").per_store();
    let rates = shares[1].1.subscriptions.iter().filter_map(|it| it.settings.rate);
    assert_eq!(rates.map(|rate| rate.to_string()).collect::<Vec<_>>(), ["50/s"]);
}

#[test]
fn a_message_of_a_broker_goes_into_one_store() {
    let source = |more: &str| format!("{TWO}[sources.x]\ntype = \"nats\"\nurl = \"nats://h\"\nstream = \"S\"\n{more}");
    for several in ["", "stores = [\"a\", \"b\"]\n"] {
        let message = fault(&source(several));
        assert!(message.contains("sources.x: ") && message.contains("e.g. stores = [\"a\"]"), "{message}");
    }
    parse(&source("stores = [\"b\"]\n")).expect("no faults");
}

#[test]
fn a_store_of_one_tenant_has_no_subscription() {
    let one = |url: &str| format!("[store]\n{url}\ntenant = \"acme\"\n[subscriptions.a]\n");
    let several = "[stores.a]\nurl = \"postgres://localhost/a\"\ntenant = \"acme\"\n[stores.b]\nurl = \"sqlite:b.db\"\n\
                   [subscriptions.a]\n";
    let of_url = one("url = \"postgres://app@localhost/shop\"");
    let (named_later, of_one, of_many) = (one(""), ":3: store.tenant: ", ":3: stores.a.tenant: ");
    for (text, place) in [(of_url.as_str(), of_one), (named_later.as_str(), of_one), (several, of_many)] {
        let message = fault(text);
        assert!(message.contains(place) && message.contains("remove `tenant` from ["), "{message}");
    }
    parse(&format!("{several}stores = [\"b\"]\n")).expect("the other store is of all tenants");
    let reading = ReadOptions { delivers: false, ..options() };
    let (_, warnings) = Config::parse_with(&of_url, reading).expect("for the commands of the tenant");
    assert_eq!(warnings, []);
    let source = format!("[sources.a]\ntype = \"webhook\"\nscheme = \"standard\"\nsecret = \"{KEY}\"\n");
    parse(&of_url.replace("[subscriptions.a]\n", &source)).expect("it receives for the tenant");
}
