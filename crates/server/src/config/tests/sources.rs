//! What a source accepts, and the faults it reports.

use super::*;

#[test]
fn ids_are_remembered_longer_than_senders_repeat() {
    let source = |more: &str, scheme: &str| {
        format!("[sources.partner]\ntype = \"webhook\"\nscheme = \"{scheme}\"\nsecret = \"{KEY}\"\n{more}\n")
    };
    // The minimum is a week, whatever the horizon, and with or without a source.
    let cure = "write remember_ids = \"7d\" (the least)";
    let message = fault(&(source("", "stripe") + "[retention]\nremember_ids = \"47h\"\n"));
    assert!(message.contains(":7: ") && message.contains("\"47h\"") && message.contains(cure), "{message}");
    for short in ["0s", "1s", "3d", "6d23h59m59s"] {
        let message = fault(&format!("[retention]\nolder_than = \"1d\"\nremember_ids = \"{short}\"\n"));
        assert!(message.contains(":3: ") && message.contains(cure), "{message}");
    }
    let message = fault(&(source("retry_horizon = \"1h\"", "stripe") + "[retention]\nremember_ids = \"1h\"\n"));
    assert!(message.contains(cure), "{message}");
    // It must also be as long as the sender repeats, whether the horizon is configured or the
    // default.
    let message = fault(&(source("retry_horizon = \"8d\"", "stripe") + "[retention]\nremember_ids = \"7d\"\n"));
    assert!(message.contains(":7: ") && message.contains("\"7d\"") && message.contains("sources.partner"), "{message}");
    assert!(
        message.contains("write remember_ids = \"8d\"") && message.contains("sources.partner.retry_horizon"),
        "{message}"
    );
    let message = fault(&source("retry_horizon = \"60d\"", "standard"));
    assert!(
        message.contains(":1: ") && message.contains("\"30d\"") && message.contains("remember_ids = \"60d\""),
        "{message}"
    );
    // Where both rules are broken, there is one fault and one cure.
    let message = fault(&(source("retry_horizon = \"60d\"", "stripe") + "[retention]\nremember_ids = \"1h\"\n"));
    assert!(message.contains("write remember_ids = \"60d\""), "{message}");
    parse(&(source("retry_horizon = \"8d\"", "stripe") + "[retention]\nremember_ids = \"8d\"\n")).expect("it is so");
    for scheme in ["standard", "stripe", "github", "shopify", "slack"] {
        parse(&(source("", scheme) + "[retention]\nremember_ids = \"7d\"\n"))
            .expect("a week is enough for all we know");
    }
    parse("[retention]\nremember_ids = \"7d\"\n").expect("it is so");
    let defaults = Config::default().retention.remember_ids;
    for scheme in ["standard", "stripe", "github", "shopify", "slack"] {
        let horizon = parse(&source("", scheme)).expect("right").sources[0].repeats_for();
        assert!(Duration::from_secs(86_400) <= horizon && horizon <= Duration::from_secs(7 * 86_400), "{scheme}");
    }
    assert!(defaults >= Duration::from_secs(7 * 86_400));
}

#[test]
fn a_source_needs_a_key() {
    assert!(fault("[sources.a]\ntype = \"webhook\"\nscheme = \"standard-webhooks\"").contains("has no secrets"));
    let text = "[sources.a]\ntype = \"webhook\"\nscheme = \"standard-webhooks\"\nsecrets = [\"env:PARTNER_SECRET\"]\nkey = \"json:/data/id\"\n";
    assert_eq!(webhook(text).key, Some(postbox_ingress::Origin::Json("/data/id".into())));
}

#[test]
fn every_scheme_has_what_it_needs() {
    let source = |scheme: &str, more: &str| {
        let text = format!("[sources.a]\ntype = \"webhook\"\nscheme = \"{scheme}\"\nsecret = \"{KEY}\"\n{more}");
        parse(&text).map(|_| webhook(&text).scheme).map_err(|faults| faults.to_string())
    };
    for scheme in ["standard-webhooks", "stripe", "github", "shopify", "slack"] {
        assert!(source(scheme, "").is_ok(), "{scheme}: {:?}", source(scheme, ""));
    }
    assert!(source("twilio", "").expect_err("no URL").contains("needs public_url"));
    assert!(source("twilio", "public_url = \"https://h/in/a\"").is_ok());
    let refused = |url: &str| source("twilio", &format!("public_url = \"{url}\"")).expect_err("refused");
    let message = refused("https://u:hunter2@h/in/a");
    assert!(message.contains("at Twilio") && !message.contains("hunter2"), "{message}");
    assert!(refused("https://h/in/a?b=c").contains("without a query"));
    assert!(source("hmac", "").expect_err("no header").contains("needs signature_header"));
    assert!(source("hmac", "signature_header = \"x-sig\"\nhash = \"sha512\"\nencoding = \"base64\"").is_ok());
    assert!(source("strype", "").expect_err("none").contains("did you mean `stripe`?"));
    assert!(
        source("slack", "signature_header = \"x\"")
            .expect_err("unknown key")
            .contains("unknown key `signature_header`")
    );
}

#[test]
fn an_old_key_may_carry_the_date_its_overlap_ends() {
    let source = |secrets: &str| {
        format!("[sources.a]\ntype = \"webhook\"\nscheme = \"standard-webhooks\"\nsecrets = [{secrets}]\n")
    };
    let text = source("\"env:PARTNER_SECRET\", { secret = \"env:HOOK_SECRET\", until = \"2026-12-01T00:00:00Z\" }");
    let secrets = webhook(&text).secrets;
    assert_eq!(secrets[0].until, None);
    assert_eq!(secrets[1].until, "2026-12-01T00:00:00Z".parse().ok());
    let retiring = |table: &str| fault(&source(&format!("\"env:PARTNER_SECRET\", {table}")));
    assert!(retiring("{ secret = \"env:HOOK_SECRET\", until = \"soon\" }").contains("e.g. \"2026-12-01T00:00:00Z\""));
    assert!(retiring("{ until = \"2026-12-01T00:00:00Z\" }").contains("has no secret"));
    assert!(retiring("{ secret = \"env:HOOK_SECRET\", untill = \"x\" }").contains("did you mean `until`?"));
    assert!(retiring("7").contains("must be a list, each item text in quotes or a table, not integer"));
    // With old keys only, nobody could send after the date.
    let only = fault(&source("{ secret = \"env:HOOK_SECRET\", until = \"2026-12-01T00:00:00Z\" }"));
    assert!(only.starts_with("postbox.toml:4: ") && only.contains("add the new one, without an end"), "{only}");
}

#[test]
fn sns_has_topics_instead_of_secrets() {
    const TOPIC: &str = "topics = [\"arn:aws:sns:eu-central-1:123456789012:orders\"]";
    let text = |keys: &str| format!("[sources.a]\ntype = \"webhook\"\nscheme = \"sns\"\n{keys}\n");
    let sns = webhook(&text(&format!("{TOPIC}\nconfirm = true")));
    assert!(sns.confirm == Some(true) && sns.topics.len() == 1);
    assert!(fault(&text("")).contains("name yours: topics = "));
    assert!(fault(&text("topics = []")).contains("name at least one"));
    assert!(
        faults(&text("topics = [\"arn:aws:sns:eu-central-1:123456789012:*\"]"))[0].contains("a topic is arn:aws:sns:")
    );
    assert!(fault(&text(&format!("{TOPIC}\nsecret = \"x\""))).contains("signs with a certificate"));
    assert!(
        fault("[sources.a]\ntype = \"webhook\"\nscheme = \"github\"\nsecret = \"0123456789abcdef\"\nconfirm = true")
            .contains("unknown key `confirm`")
    );
}

#[test]
fn a_tenant_comes_from_what_is_signed() {
    let source = |scheme: &str, keys: &str| {
        format!("[sources.a]\ntype = \"webhook\"\nscheme = \"{scheme}\"\nsecret = \"{KEY}\"\n{keys}\n")
    };
    for scheme in ["shopify", "github", "stripe", "slack", "standard-webhooks"] {
        let message = fault(&source(scheme, "tenant = \"header:x-shopify-shop-domain\""));
        assert!(
            message.starts_with("postbox.toml:5: [sources.a]: the tenant comes from header:x-shopify"),
            "{message}"
        );
        assert!(message.contains("a source for each tenant"), "{message}");
        for tenant in ["acme", "json:/tenant"] {
            parse(&source(scheme, &format!("tenant = \"{tenant}\""))).expect("signed, or fixed");
        }
    }
    let sns = |tenant: &str| {
        let topics = "topics = [\"arn:aws:sns:eu-central-1:123456789012:orders\"]";
        format!("[sources.a]\ntype = \"webhook\"\nscheme = \"sns\"\n{topics}\ntenant = \"json:{tenant}\"\n")
    };
    assert!(fault(&sns("/MessageAttributes/shop/Value")).contains("sns does not sign"));
    parse(&sns("/Subject")).expect("it is signed");
}

#[test]
fn an_id_that_nobody_signed_is_a_warning_at_its_line() {
    let source =
        |id: &str| format!("[sources.a]\ntype = \"webhook\"\nscheme = \"github\"\nsecret = \"{KEY}\"\nid = \"{id}\"\n");
    let found = warnings(&source("header:x-github-delivery"));
    assert_eq!(found.iter().map(|warning| warning.line).collect::<Vec<_>>(), [5]);
    assert!(found[0].text.contains("applied again under other ids"), "{found:?}");
    assert_eq!(warnings(&source("json:/delivery")), []);
    let timed = source("header:x-time")
        .replace("github\"", "hmac\"\nsignature_header = \"x-a\"\ntimestamp_header = \"x-time\"");
    assert_eq!(warnings(&timed), [], "its signature covers the time");
    assert!(fault(&source("one")).contains("every message would have the same id"));
}

#[test]
fn what_no_message_could_fit_is_reported_before_it_starts() {
    let source = |keys: &str| {
        fault(&format!("[sources.a]\ntype = \"webhook\"\nscheme = \"github\"\nsecret = \"{KEY}\"\n{keys}\n"))
    };
    assert!(source("topic = \"a b\"").contains("no white space"));
    assert!(source(&format!("tenant = \"{}\"", "t".repeat(129))).contains("at most 128"));
    assert!(source(&format!("key = \"{}\"", "k".repeat(1_025))).contains("at most 1024"));
}

#[test]
fn a_secret_with_nothing_in_it_is_reported_at_its_line() {
    let source = |secrets: &str| fault(&format!("[sources.a]\ntype = \"webhook\"\nscheme = \"github\"\n{secrets}\n"));
    for secrets in [
        "secret = \"\"",
        "secret = \"                \"",
        "secrets = [\"0123456789abcdef\", \"\"]",
        "secrets = [\"0123456789abcdef\", { secret = \"\\t\", until = \"2026-12-01T00:00:00Z\" }]",
        "secret = \"env:BLANK\"",
    ] {
        let message = source(secrets);
        assert!(message.starts_with("postbox.toml:4: ") && message.contains("empty or blank; write"), "{message}");
    }
    assert!(source("secrets = []").contains("has no secrets"));
    let message = source("secret = \"0123456789abcdef\\n\"");
    assert!(message.starts_with("postbox.toml:4: ") && message.contains("white space"), "{message}");
    assert!(!message.contains("0123"), "{message}");
}

#[test]
fn a_webhook_s_name_stays_in_its_path() {
    let source = |name: &str| {
        format!("[sources.\"{name}\"]\ntype = \"webhook\"\nscheme = \"github\"\nsecret = \"0123456789abcdef\"\n")
    };
    for name in [".", ".."] {
        let message = fault(&source(name));
        assert!(message.starts_with("postbox.toml:1: ") && message.contains("give it another name"), "{message}");
    }
    parse(&source("a..")).expect("it is a name like others");
}

#[test]
fn a_tolerance_fits_what_is_signed_and_remembered() {
    let source = |scheme: &str, keys: &str| {
        format!("[sources.a]\ntype = \"webhook\"\nscheme = \"{scheme}\"\nsecret = \"{KEY}\"\n{keys}\n")
    };
    let hmac = "signature_header = \"x-sig\"\n";
    for (scheme, more) in
        [("github", ""), ("shopify", ""), ("twilio", "public_url = \"https://h/in/a\"\n"), ("hmac", hmac)]
    {
        let message = fault(&source(scheme, &format!("tolerance = \"5m\"\n{more}")));
        assert!(message.starts_with("postbox.toml:5: ") && message.contains("leave it out"), "{message}");
    }
    let timed = format!("{hmac}timestamp_header = \"x-time\"\n");
    parse(&source("hmac", &format!("tolerance = \"5m\"\n{timed}"))).expect("it signs a time");
    let twice = fault(&source("hmac", &format!("{hmac}timestamp_header = \"X-Sig\"\n")));
    assert!(twice.starts_with("postbox.toml:6: ") && twice.contains("both the signature and the time"), "{twice}");
    // Signed as far ahead as allowed, a message stays fresh for twice the tolerance.
    for (tolerance, remembered) in [("60d", "30d"), ("15d", "30d"), ("4d", "7d")] {
        let text = source("slack", &format!("tolerance = \"{tolerance}\"\n"))
            + &format!("[retention]\nremember_ids = \"{remembered}\"\n");
        let message = fault(&text);
        assert!(message.starts_with("postbox.toml:5: ") && message.contains("would be applied twice"), "{message}");
    }
    parse(&source("slack", "tolerance = \"14d\"\n")).expect("28 days are less than 30");
}
