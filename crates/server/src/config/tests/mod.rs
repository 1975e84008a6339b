//! What a configuration accepts, and the faults it reports.

mod documents;
mod lease;
mod many;
mod safety;
mod sources;

use std::time::Duration;

use postbox_config::{LiveSecret, Reader, Table};
use postbox_core::OnDead;
use postbox_engine::RelaySettings;
use postbox_http::HttpSinkTable;
use postbox_ingress::WebhookTable;
use toml::de::DeTable;

use super::*;

/// The secret of the published Standard Webhooks vectors.
pub(super) const KEY: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

pub(super) fn env(name: &str) -> Option<String> {
    match name {
        "COLLECTOR_KEY" | "HOOK_SECRET" | "KAFKA_PASSWORD" | "MQTT_PASSWORD" | "PARTNER_SECRET"
        | "RABBITMQ_PASSWORD" | "REDIS_PASSWORD" | "SQS_SECRET_KEY" | "SQS_SESSION_TOKEN" => Some(KEY.into()),
        "DATABASE_URL" => Some("postgres://u:hunter2@h/db".into()),
        "DIRECT_DATABASE_URL" => Some("postgres://u:hunter2@h/direct".into()),
        "ACME_DATABASE_URL" => Some("postgres://u:hunter2@h/acme".into()),
        "SHORT" => Some("whsec_abc".into()),
        "POSTBOX_STATUS_TOKEN" => Some("0123456789abcdef".into()),
        "BLANK" => Some(" ".repeat(16)),
        "OF_A_FILE" => Some("sqlite:hunter2.db\n".into()),
        _ => None,
    }
}

/// The options a service reads with, and the environment of these tests.
pub(super) fn options() -> ReadOptions<'static> {
    ReadOptions { env: &env, ..from_environment(FILE_DEFAULT) }
}

pub(super) fn parse(text: &str) -> Result<Config, Faults> {
    Config::parse_with(text, options()).map(|(config, _)| config)
}

/// The warnings of a valid configuration.
pub(super) fn warnings(text: &str) -> Vec<Fault> {
    Config::parse_with(text, options()).expect("no faults").1
}

/// The table of an adapter at `path` of a valid configuration.
fn adapter<T: Table>(text: &str, path: &[&str]) -> T {
    parse(text).expect("no faults");
    let root = DeTable::parse(text).expect("it is TOML");
    let mut table = root.get_ref();
    for name in path {
        table = table.get(*name).and_then(|value| value.get_ref().as_table()).expect("it is there");
    }
    T::read(&Section::new(&Reader::new(text, options()), path.join("."), 1, table))
}

fn http(text: &str) -> HttpSinkTable {
    adapter(text, &["subscriptions", "a", "sink"])
}

fn webhook(text: &str) -> WebhookTable {
    adapter(text, &["sources", "a"])
}

pub(super) fn faults(text: &str) -> Vec<String> {
    parse(text).expect_err("faults").to_string().lines().map(str::to_owned).collect()
}

pub(super) fn fault(text: &str) -> String {
    let faults = faults(text);
    assert_eq!(faults.len(), 1, "{faults:#?}");
    faults[0].clone()
}

#[test]
fn a_dead_letter_has_its_headers() {
    let with =
        |dead_to: &str| format!("[subscriptions.a]\nsink = {{ type = \"stdout\" }}\ndead_to = {{ type = {dead_to} }}");
    for dead_to in [r#""stdout""#, r#""file", path = "d""#, r#""redis", url = "redis://h", stream = "d""#] {
        let fault = fault(&with(&format!("{dead_to}, envelope = \"replica\"")));
        assert!(fault.contains(":3: ") && fault.contains("envelope = \"json\""), "{fault}");
        parse(&with(&format!("{dead_to}, envelope = \"json\""))).expect("no fault");
    }
    parse(&with(r#""redis", url = "redis://h", stream = "d""#)).expect("no fault");
}

#[test]
fn the_default_file_says_exactly_the_defaults() {
    assert_defaults(&default_toml());
}

fn assert_defaults(text: &str) {
    let (config, risks) = Config::parse_with(text, options()).expect("no faults");
    assert_eq!(format!("{config:?}"), format!("{:?}", Config::default()));
    assert_eq!((config.store.url, risks), (Config::default().store.url, Vec::new()));
    assert!(config.subscriptions.is_empty() && config.sources.is_empty() && config.stores.is_empty());
}

/// The default file with every commented-out key in force. `[store]` and `[stores.acme]` exclude
/// each other; the second is kept. So do `rate` and `rate_of`; the first is kept. The store is of
/// no tenant, because there is a subscription.
fn uncommented() -> String {
    let text = default_toml();
    let lines = text.lines().filter(|line| !line.starts_with("#rate_of")).map(|line| match line.strip_prefix('#') {
        Some(code) if !code.starts_with(' ') => code,
        _ => line,
    });
    let text = lines.collect::<Vec<_>>().join("\n");
    let (before, rest) = text.split_once("[store]\n").expect("one store");
    let (_, after) = rest.split_once("\n# Where the logs are, where").expect("several stores");
    let after = after.replacen("\ntenant = ", "\n# tenant = ", 1);
    format!("{before}# Where the logs are, where{after}")
}

#[test]
fn the_examples_in_the_default_file_are_right_when_uncommented() {
    let config = parse(&uncommented()).expect("no faults");
    assert_eq!(config.subscriptions.len(), 1);
    assert_eq!(config.sources.len(), crate::sources::SOURCES.len(), "one of each type");
    // The values that the comments show as defaults are the defaults.
    let shown = &config.subscriptions[0];
    let RelaySettings { concurrency, rate, .. } = shown.settings;
    assert_eq!(shown.settings, RelaySettings { concurrency, rate, ..RelaySettings::default() });
    assert_eq!(shown.sink.type_name(), "http");
}

#[test]
fn an_empty_file_is_all_defaults() {
    assert_defaults("");
}

#[test]
fn a_whole_subscription_is_understood() {
    let text = r#"
[store]
url = "env:DATABASE_URL"
[subscriptions.a]
topics = ["order.*", "refund.*"]
tenant = "acme"
kinds = ["integration", "audit"]
aggregates = ["order"]
headers = { region = "eu", tier = "gold" }
ordering = "none"
lanes = 4
batch = 100
retry = { max_attempts = 3, base = "250ms", max = "2m" }
on_dead = "halt"
schedule = "*/10 * * * * *"
sink = { type = "http", url = "https://example.org/hook", secret = "env:HOOK_SECRET" }
"#;
    let config = parse(text).expect("no faults");
    let subscription = &config.subscriptions[0];
    let filter = &subscription.subscription.filter;
    assert_eq!(
        filter.to_string(),
        "order.* refund.* kind=integration|audit aggregate=order region=eu tier=gold tenant=acme"
    );
    assert_eq!(subscription.subscription.lanes, Some(4));
    assert_eq!(subscription.settings.retry.attempts_max, 3);
    assert_eq!(subscription.settings.retry.base, Duration::from_millis(250));
    assert_eq!(subscription.subscription.on_dead, OnDead::Halt);
    assert_eq!(http(text).secret, Some(LiveSecret { secret: crate::Secret::new(KEY), until: None }));
}

#[test]
fn a_list_of_delays_means_as_many_retries() {
    let attempts = |retry: &str| {
        let config = parse(&format!("[subscriptions.a]\nretry = {{ {retry} }}\n")).expect("no faults");
        config.subscriptions[0].settings.retry.attempts_max
    };
    assert_eq!(attempts(""), 30);
    assert_eq!(attempts("delays = [\"1s\", \"30s\", \"5m\"]"), 4);
    assert_eq!(attempts("delays = [\"1s\"], max_attempts = 7"), 7);
    assert_eq!(attempts("max_attempts = \"unlimited\""), u32::MAX);
    let text = fault("[subscriptions.a]\nretry = { max_attempts = \"forever\" }\n");
    assert!(text.ends_with("max_attempts is neither a number nor \"unlimited\""), "{text}");
    let text = fault("[subscriptions.a]\nretry = { delays = [] }\n");
    assert!(text.contains(":2: subscriptions.a.retry.delays is empty; "), "{text}");
    let text = fault("[subscriptions.a]\nretry = { base = \"1s\", delays = [\"1s\"] }\n");
    assert!(text.contains(":2: subscriptions.a.retry.base cannot be used together with "), "{text}");
}

#[test]
fn all_faults_come_at_once_each_at_its_line() {
    let found = faults(
        r#"[store]
url = "mysql://h/db"
[subscriptions.orders]
batsh = 10
lanes = 0
ordering = "random"
retry = { max_attempts = "ten" }
sink = { type = "amqp", brokers = "x" }
[sources.partner]
type = "webhook"
scheme = "sms"
[server]
listen = "localhost"
[subscription.x]
"#,
    );
    let lines: Vec<&str> = found.iter().map(|fault| fault.split(": ").next().expect("a place")).collect();
    let expected = [2, 4, 5, 6, 7, 8, 9, 11, 13, 14].map(|line| format!("postbox.toml:{line}"));
    assert_eq!(lines, expected, "{found:#?}");
}

#[test]
fn unknown_keys_are_refused_with_the_nearest_name() {
    let text = fault("[subscriptions.a]\nretry = { max_atempts = 3 }\n");
    assert_eq!(
        text,
        "postbox.toml:2: unknown key `max_atempts` in [subscriptions.a.retry]; did you mean `max_attempts`?"
    );
    assert!(fault("[sevrer]").contains("did you mean `server`?"));
    assert!(fault("[server]\nport = 1").contains("known here: listen, connections, header_timeout, stop_timeout"));
    assert!(fault("stray = 1").contains("unknown section `stray`"));
    assert!(fault("straykeyofmany = 1").contains("unknown section; known here: store, stores, server, subscriptions"));
}

#[test]
fn unknown_sinks_are_refused_with_the_nearest_name() {
    assert!(fault("[subscriptions.a]\nsink = { type = \"htpp\" }").contains("did you mean `http`?"));
    assert!(fault("[subscriptions.a]\nsink = \"http\"").contains("must be a table, not string"));
    assert!(fault("[subscriptions.a]\nsink = { url = \"http://h\" }").contains("has no type"));
}

#[test]
fn without_a_file_a_variable_is_a_sink() {
    let of = |variables: &[(&str, &str)]| {
        let find = |name: &str| variables.iter().find(|(its, _)| *its == name).map(|(_, value)| (*value).to_owned());
        let (config, _) = Config::without_file(find, true).map_err(|error| error.to_string())?;
        let sinks = config.subscriptions.iter().map(|it| (it.subscription.name.to_string(), it.sink.type_name()));
        Ok::<_, String>(sinks.collect::<Vec<_>>())
    };
    assert_eq!(of(&[]), Ok(Vec::new()));
    assert_eq!(of(&[("DISPATCHER_URL", "")]), Ok(Vec::new()));
    assert_eq!(of(&[("DISPATCHER_URL", "http://10.0.0.1:8080/in")]), Ok(vec![("dispatcher".into(), "http")]));
    let ours = of(&[("DISPATCHER_URL", "http://127.0.0.1:8600/in/x")]).expect_err("the service's own address");
    assert!(ours.starts_with("environment:2: DISPATCHER_URL: ") && ours.contains("Postbox's own"), "{ours}");
    let queue = of(&[("SQS_QUEUE_URL", "https://sqs.eu-west-1.amazonaws.com/1/q")]);
    if cfg!(feature = "sqs") {
        assert_eq!(queue, Ok(vec![("sqs".into(), "sqs")]));
    }
    for hostile in ["\"\n[store]\nurl = \"memory:\"", "a\\", "x\u{1b}"] {
        let fault = of(&[("DISPATCHER_URL", hostile)]).expect_err("no address");
        assert!(fault.starts_with("environment:2: DISPATCHER_URL: subscriptions.dispatcher.sink.url"), "{fault}");
    }
    let looking = Config::without_file(|name| (name == "DISPATCHER_URL").then(|| "ftp://x".to_owned()), false);
    let (_, warnings) = looking.expect("what is wrong with a sink keeps nobody from looking");
    assert_eq!(warnings.iter().map(|fault| fault.line).collect::<Vec<_>>(), [2]);
}

#[test]
fn a_missing_secret_names_the_variable() {
    let text = fault("[subscriptions.a]\nsink = { type = \"http\", url = \"https://h/\", secret = \"env:NOT_THERE\" }");
    assert_eq!(
        text,
        "postbox.toml:2: subscriptions.a.sink.secret needs the environment variable NOT_THERE, which is not set; export NOT_THERE=…"
    );
}

#[test]
fn a_key_that_is_none_is_refused_without_showing_it() {
    let text = fault("[subscriptions.a]\nsink = { type = \"http\", url = \"https://h/\", secret = \"env:SHORT\" }");
    assert!(text.starts_with("postbox.toml:2: ") && !text.contains("whsec_abc"), "{text}");
}

#[test]
fn commands_that_only_look_do_without_the_sinks_secrets() {
    let text = "[subscriptions.a]\nsink = { type = \"http\", url = \"https://h/\", secret = \"env:NOT_THERE\" }";
    let reading = ReadOptions { delivers: false, ..options() };
    assert!(Config::parse_with(text, reading).is_ok());
    let text = "[subscriptions.a]\nsink = { type = \"http\", url = \"https://h/\", secret = \"env:SHORT\" }";
    assert!(Config::parse_with(text, reading).is_ok(), "what is wrong with one keeps nobody from looking");
    let text = "[store]\nurl = \"env:NOT_THERE\"";
    assert!(Config::parse_with(text, reading).is_err());
}

#[test]
fn what_only_delivery_needs_keeps_nobody_from_looking() {
    let text = "[store]\nurl = \"sqlite:a.db\"\n[subscriptions.a]\nlog = \"inbox\"\nsink = { type = \"http\", url = \"ftp://h/\" }\n[log]\nlevel = 3";
    let reading = ReadOptions { delivers: false, ..options() };
    let (config, warnings) = Config::parse_with(text, reading).expect("its store is right");
    assert_eq!(config.subscriptions[0].subscription.log.as_str(), "inbox");
    assert_eq!(warnings.iter().map(|fault| fault.line).collect::<Vec<_>>(), [5, 7]);
    assert_eq!(Config::parse(text).expect_err("two faults").to_string().lines().count(), 2);
    assert!(Config::parse_with("[subscriptions.a]\nlanes = 0", reading).is_err());
    let source = "[sources.a]\ntype = \"webhook\"\nscheme = \"slack\"\nsecret = \"env:HOOK_SECRET\"\n";
    for (text, line) in [
        (format!("{source}stores = [\"b\"]"), 5),
        (format!("{source}tolerance = \"60d\""), 5),
        ("[retention]\nremember_ids = \"1h\"".to_owned(), 2),
        ("[subscriptions.a]\ndead_to = { type = \"stdout\", envelope = \"replica\" }".to_owned(), 2),
    ] {
        let (_, warnings) = Config::parse_with(&text, reading).expect("its store is right");
        assert_eq!(warnings.iter().map(|fault| fault.line).collect::<Vec<_>>(), [line], "{text}");
        assert!(parse(&text).is_err(), "{text}");
    }
    assert!(Config::parse_with("[subscriptions.a]\nstores = [\"b\"]", reading).is_err());
}

#[test]
fn passwords_and_keys_are_never_in_debug_output() {
    let text = "[store]\nurl = \"env:DATABASE_URL\"\n[subscriptions.a]\nsink = { type = \"http\", url = \"https://h/\", secret = \"env:HOOK_SECRET\", headers = { authorization = \"Bearer hunter2\" } }";
    let shown = format!("{:?}", parse(text).expect("no faults"));
    assert!(!shown.contains("hunter2") && !shown.contains(KEY), "{shown}");
}

#[test]
fn what_is_not_toml_is_said_at_its_line() {
    let found = faults("[store]\nurl = \n[server\n");
    assert!(found[0].starts_with("postbox.toml:2: this is not TOML: "), "{found:#?}");
    assert!(found.len() >= 2, "the second one is missing: {found:#?}");
}

#[test]
fn names_urls_and_schedules_are_checked() {
    assert!(fault("[subscriptions.\"a b\"]").contains("not a valid name"));
    assert!(fault("[subscriptions.a]\nlog = \"Out Box\"").contains("valid log name"));
    assert!(fault("[subscriptions.a]\nschedule = \"at three\"").contains("second minute hour"));
    assert!(fault("[subscriptions.a]\ntopics = [\"order paid\"]").contains("white space"));
    for (line, said) in [
        ("kinds = [\"integration\", \"\"]", "kinds: the kind must have 1 to 128 bytes and no control characters"),
        ("aggregates = [\"\"]", "aggregates: the aggregate must have 1 to 128 bytes"),
        ("headers = { \"a b\" = \"x\" }", "\"a b\" is not a valid header name: letters, digits"),
        ("headers = { a = \"x\\ny\" }", "the value of header a has a control character"),
        ("headers = { a = 1 }", "headers.a"),
    ] {
        let found = fault(&format!("[subscriptions.a]\n{line}"));
        assert!(found.contains(":2: ") && found.contains(said), "{found}");
    }
    let long = "x".repeat(129);
    assert!(fault(&format!("[subscriptions.a]\nkinds = [\"{long}\"]")).contains("1 to 128 bytes"));
    let replica = |name: &str| format!("[server]\nname = \"{name}\"\n");
    assert!(fault(&replica("a b")).contains("not a valid name"));
    assert!(fault(&replica(&long[..112])).contains("at most 111"));
    assert!(parse(&replica(&long[..111])).is_ok());
    let url = |url: &str| fault(&format!("[subscriptions.a]\nsink = {{ type = \"http\", url = \"{url}\" }}"));
    assert!(url("example.org/hook").contains("https://"));
    assert!(url("ftp://example.org/").contains("https://"));
    assert!(!url("https://u:hunter2@h/").contains("hunter2"));
    assert!(fault("[subscriptions.a]\nretry = { base = \"4h\" }").contains("longer than max"));
}

/// An empty list is ambiguous: it could mean everything or nothing.
#[test]
fn a_filter_that_is_empty_is_refused_at_its_line() {
    for line in
        ["topics = []", "kinds = []", "aggregates = []", "headers = {}", "[subscriptions.a.headers]", "stores = []"]
    {
        let found = fault(&format!("[subscriptions.a]\n{line}"));
        assert!(found.contains(":2: subscriptions.a.") && found.contains("leave it out for all"), "{found}");
    }
    // A wrong element gives one fault, not two.
    assert!(fault("[subscriptions.a]\nkinds = [1]").contains("text in quotes"));
}

#[test]
fn a_tenant_is_of_a_store_that_separates_them() {
    let store = |url: &str| format!("[store]\n{url}\ntenant = \"acme\"\n");
    assert!(fault(&store("url = \"sqlite:a.db\"")).contains(":3: store.tenant: only a Postgres store"));
    parse(&store("url = \"postgres://app@localhost/shop\"")).expect("no faults");
    parse(&store("")).expect("the URL may come with --store");
}

#[test]
fn a_variable_is_refused_where_none_is_looked_up() {
    for line in [
        "topics = [\"env:TOPIC\"]",
        "tenant = \"env:TENANT\"",
        "kinds = [\"env:KIND\"]",
        "aggregates = [\"env:AGGREGATE_OF_IT\"]",
        "headers = { region = \"env:REGION\" }",
        "sink = { type = \"http\", url = \"https://h/\", allow = [\"env:NETS\"] }",
    ] {
        let found = fault(&format!("[subscriptions.a]\n{line}"));
        assert!(found.contains(":2: subscriptions.a.") && found.contains("is not looked up here"), "{found}");
    }
    // Values that only look like variables.
    parse("[subscriptions.a]\ntopics = [\"env:created\", \"env:*\"]\nkinds = [\"env:\"]").expect("no faults");
}

#[test]
fn an_old_signing_key_may_carry_the_date_its_overlap_ends() {
    let subscription = |secrets: &str| {
        format!("[subscriptions.a.sink]\ntype = \"http\"\nurl = \"https://h/\"\nsecrets = [{secrets}]\n")
    };
    const OLD: &str = "{ secret = \"env:HOOK_SECRET\", until = \"2026-12-01T00:00:00Z\" }";
    let secrets = http(&subscription(&format!("\"env:PARTNER_SECRET\", {OLD}"))).secrets;
    assert_eq!(secrets[0].until, None);
    assert_eq!(secrets[1].until, "2026-12-01T00:00:00Z".parse().ok());
    // In any order, and together with `secret`.
    parse(&subscription(&format!("{OLD}, \"env:PARTNER_SECRET\""))).expect("no faults");
    parse(&subscription(OLD).replace("secrets", "secret = \"env:PARTNER_SECRET\"\nsecrets")).expect("no faults");
    // With old keys only, nothing would be signed after the last date.
    for only in [OLD.to_owned(), format!("{OLD}, {OLD}")] {
        let message = fault(&subscription(&only));
        assert!(
            message.starts_with("postbox.toml:4: ") && message.contains("add the new one, without an end"),
            "{message}"
        );
    }
    let retiring = |table: &str| fault(&subscription(&format!("\"env:PARTNER_SECRET\", {table}")));
    assert!(retiring("{ secret = \"env:HOOK_SECRET\", until = \"soon\" }").contains("e.g. \"2026-12-01T00:00:00Z\""));
    assert!(retiring("{ until = \"2026-12-01T00:00:00Z\" }").contains("has no secret"));
    assert!(retiring("{ secret = \"env:HOOK_SECRET\", untill = \"x\" }").contains("did you mean `until`?"));
    let short = retiring("{ secret = \"env:SHORT\", until = \"2026-12-01T00:00:00Z\" }");
    assert!(short.starts_with("postbox.toml:4: ") && !short.contains("whsec_abc"), "{short}");
    // A new key whose variable is missing gives one fault, not two.
    assert!(fault(&subscription(&format!("\"env:NOT_THERE\", {OLD}"))).contains("NOT_THERE"));
    // The limit on keys is found before the sink starts.
    assert!(fault(&subscription(&["\"env:PARTNER_SECRET\""; 9].join(", "))).contains("at most 8"));
    // Commands that only read need no secrets.
    let reading = ReadOptions { env: &|_| None, delivers: false, ..options() };
    assert!(Config::parse_with(&subscription(&format!("\"env:PARTNER_SECRET\", {OLD}")), reading).is_ok());
}

#[test]
fn sinks_and_sources_are_bounded_as_the_file_says() {
    let text = r#"
[subscriptions.a]
rate = "50/s"
sink = { type = "http", url = "https://h/", allow = ["10.20.0.0/16", "fd00::1"], client_cert = "a.pem", client_key = "a.key" }
[sources.a]
type = "webhook"
scheme = "github"
secret = "0123456789abcdef"
body_max = "2MiB"
body_timeout = "3s"
concurrency = 7
rate = "600/m"
allowed_origins = ["events.example.org"]
[server]
connections = 100
header_timeout = "2s"
"#;
    let config = parse(text).expect("no faults");
    assert_eq!(config.subscriptions[0].settings.rate, "50/s".parse().ok());
    let http = http(text);
    let allow = ["10.20.0.0/16", "fd00::1/128"].map(|net| net.parse().expect("a network")).to_vec();
    assert_eq!(http.allow, allow);
    assert_eq!(http.client_key.as_deref(), Some(Path::new("a.key")));
    let source = webhook(text);
    assert_eq!((source.body_max, source.concurrency), (2 << 20, 7));
    assert_eq!((source.body_timeout, source.rate), (Duration::from_secs(3), "600/m".parse().ok()));
    assert_eq!(source.allowed_origins, ["events.example.org"]);
    assert_eq!((config.server.connections, config.server.header_timeout), (100, Duration::from_secs(2)));
}

#[test]
fn bounds_that_are_none_are_refused_with_a_cure() {
    let sink =
        |keys: &str| fault(&format!("[subscriptions.a]\nsink = {{ type = \"http\", url = \"https://h/\", {keys} }}"));
    assert!(sink("allow = [\"10.0.0.0/33\"]").contains("is not a valid network; write e.g. \"10.20.0.0/16\""));
    assert!(sink("allow = [\"internal\"]").contains("is not a valid network"));
    assert!(sink("public_only = true").contains("public_only"));
    let guarded = |url: &str| fault(&format!("[subscriptions.a]\nsink = {{ type = \"http\", url = \"{url}\" }}"));
    for url in [
        "http://127.0.0.1/",
        "http://0x7f.1/",
        "https://[::ffff:10.0.0.1]/",
        "http://169.254.169.254/latest",
        "http://localhost:1/",
    ] {
        let message = guarded(url);
        assert!(message.contains("is not public; if it is intended, allow it: allow = [\""), "{message}");
    }
    let own = |listen: &str, url: &str| {
        format!(
            "[server]\nlisten = \"{listen}\"\n[subscriptions.a]\nsink = {{ type = \"http\", url = \"{url}\", allow = [\"127.0.0.0/8\", \"::1\"] }}\n"
        )
    };
    for listen in ["127.0.0.1:8600", "0.0.0.0:8600", "[::]:8600"] {
        for url in ["http://127.0.0.1:8600/in/a", "http://localhost:8600/in/a"] {
            let message = fault(&own(listen, url));
            assert!(
                message.starts_with("postbox.toml:4: ") && message.contains("Postbox's own [server] listen"),
                "{message}"
            );
        }
        parse(&own(listen, "http://127.0.0.1:8601/in/a")).expect("another port is somebody else");
    }
    // The default address, of a file without [server].
    let unsaid = own("", "http://127.0.0.1:8600/in/a").replace("[server]\nlisten = \"\"\n", "");
    assert!(fault(&unsaid).starts_with("postbox.toml:2: ") && fault(&unsaid).contains("Postbox's own"));
    for key in ["client_cert", "client_key"] {
        assert!(sink(&format!("{key} = \"a.pem\"")).contains("one of client_cert and client_key; it needs both"));
    }
    assert!(sink("headers = { webhook-id = \"x\" }").contains("give a `secret`"));
    assert!(sink("headers = { Host = \"x\" }").contains("it is the host of the url"));
    assert!(fault("[subscriptions.a]\nrate = \"fast\"").contains("e.g. \"50/s\""));
    assert!(fault("[subscriptions.a]\nrate = 50").contains("must be text in quotes"));
    let source = |keys: &str| {
        fault(&format!("[sources.a]\ntype = \"webhook\"\nscheme = \"github\"\nsecret = \"{KEY}\"\n{keys}"))
    };
    assert!(source("rate = \"0/s\"").contains("is not a valid rate"));
    assert!(source("concurrency = 0").contains("out of range"));
    assert!(source("body_timeout = \"1ms\"").contains("too short"));
    assert!(fault("[retention]\ndead = \"1h\"").ends_with("\"1h\" is too short; at least 1d"));
    assert!(source("allowed_origins = [\"*\"]").contains("is not a valid origin; write the name"));
    assert!(fault("[server]\nconnections = 0").contains("out of range"));
}

#[test]
fn a_sink_that_could_not_sign_or_show_itself_is_reported_at_its_line() {
    let sink = |keys: &str| format!("[subscriptions.a.sink]\ntype = \"http\"\nurl = \"https://h/\"\n{keys}\n");
    let message = fault(&sink("secrets = []"));
    assert!(
        message.starts_with("postbox.toml:4: ") && message.contains("leave it out to send without a signature"),
        "{message}"
    );
    for (wrong, hint) in [
        ("secret = \"plain\"", "openssl rand"),
        ("secret = \"whpk_AAAA\"", "sign with the private one, whsk_"),
        ("secret = \"\"", "empty or blank"),
        ("secrets = [\"env:HOOK_SECRET\", \"\"]", "empty or blank"),
        ("secret = \"env:BLANK\"", "empty or blank"),
    ] {
        let message = fault(&sink(wrong));
        assert!(message.starts_with("postbox.toml:4: ") && message.contains(hint), "{message}");
    }
    // Files are checked only by commands that need them.
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let missing = "/nonexistent/a.pem";
    let read = |text: &str, files| Config::parse_with(text, ReadOptions { files, ..options() });
    for (keys, line) in [
        (format!("ca_file = \"{missing}\""), 4),
        (format!("ca_file = \"{own}\""), 4),
        (format!("client_key = \"{missing}\"\nclient_cert = \"{missing}\""), 5),
        (format!("client_key = \"{own}\"\nclient_cert = \"{own}\""), 5),
    ] {
        // The same for a target in an allowed private network.
        let inside = sink(&keys).replace("https://h/", "https://10.0.0.1/") + "allow = [\"10.0.0.0/8\"]\n";
        let message = read(&inside, true).expect_err("unusable").to_string();
        assert!(message.starts_with(&format!("postbox.toml:{line}: ")) && message.contains("is unusable"), "{message}");
        let message = read(&sink(&keys), true).expect_err("unusable").to_string();
        assert!(message.starts_with(&format!("postbox.toml:{line}: ")) && message.contains("is unusable"), "{message}");
        read(&sink(&keys), false).expect("a command that only looks does without");
    }
}

/// Every TOML example of a configuration in the README and the guides, with the name of its page.
fn examples_in_the_documentation() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let guides = std::fs::read_dir(root.join("docs/guide")).expect("the guides are there");
    let pages = guides.map(|entry| entry.expect("a guide").path()).chain([root.join("README.md")]);
    let mut examples = Vec::new();
    for page in pages.filter(|page| page.extension().is_some_and(|extension| extension == "md")) {
        let text = std::fs::read_to_string(&page).expect("a page of text");
        let code = text.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
        // Cargo manifests are TOML as well.
        let ours = code.filter(|code| !code.contains("[dependencies]") && !code.contains("[package]"));
        examples.extend(ours.map(|code| (page.display().to_string(), code.to_owned())));
    }
    assert!(!examples.is_empty(), "the documentation shows no configuration");
    examples
}

#[test]
fn the_examples_in_the_documentation_are_right() {
    for (page, example) in examples_in_the_documentation() {
        let url = |name: &str| name.contains("STORE") || name.contains("URL");
        let env = |name: &str| Some(if url(name) { format!("postgres://localhost/{name}") } else { KEY.to_owned() });
        let reading = ReadOptions { env: &env, ..from_environment(&page) };
        if let Err(faults) = Config::parse_with(&example, reading) {
            panic!("{faults}\nin\n{example}");
        }
    }
}
