//! What faults never repeat, and what a configuration warns of.

use super::super::{Config, ReadOptions};
use super::{KEY, fault, faults, options, parse, warnings};

/// A secret in any wrong place: the fault names the place and not the secret.
#[test]
fn a_secret_in_the_wrong_place_is_not_repeated() {
    let canary = "Xk3vTq9LmZ2rWc8PbN4y";
    let source = "[sources.a]\ntype = \"webhook\"\nscheme = \"github\"\n";
    let sink = |more: &str| {
        format!("[subscriptions.a]\nsink = {{ type = \"http\", url = \"https://h/\", secret = \"{KEY}\", {more} }}\n")
    };
    let places = [
        format!("{source}secret = \"env:{canary}\"\n"),
        format!("{source}secret = \"env:{}\"\n", canary.to_lowercase()),
        format!("{source}secret = \"{KEY}\"\n{canary} = \"x\"\n"),
        format!("{canary} = \"x\"\n"),
        format!("[{canary}]\n"),
        format!("[sources.\"{canary}?\"]\n"),
        format!("{source}secret = \"{KEY}\"\nlog = \"{canary}\"\n"),
        format!("[sources.a]\ntype = \"{canary}\"\n"),
        format!("[sources.a]\ntype = \"webhook\"\nscheme = \"{canary}\"\nsecret = \"{KEY}\"\n"),
        format!("[store]\nurl = \"{canary}@h/db\"\n"),
        format!("[store]\nurl = \"postgres:{canary}@h/db\"\n"),
        format!("[store]\nurl = \"env:postgres://u:{canary}@h/db\"\n"),
        format!("[server]\nlisten = \"{canary}\"\n"),
        format!("[subscriptions.a]\nsink = {{ type = \"{canary}\" }}\n"),
        format!("[subscriptions.a]\nsink = {{ type = \"http\", url = \"https://{canary}@h/\" }}\n"),
        format!("[subscriptions.a]\nsink = {{ type = \"http\", url = \"https://u:{canary}@h/\" }}\n"),
        sink(&format!("headers = {{ \"Bearer {canary}\" = \"x\" }}")),
        sink(&format!("headers = {{ {canary} = \"env:NOT_THERE\" }}")),
        sink(&format!("allow = [\"{canary}\"]")),
    ];
    for place in places {
        let text = faults(&place).join("\n").to_lowercase();
        assert!(text.contains("postbox.toml:") && !text.contains(&canary.to_lowercase()), "{place}\n{text}");
    }
}

#[test]
fn what_is_allowed_and_still_a_risk_is_warned_of_at_its_line() {
    let url = warnings("[store]\nurl = \"postgres://u:hunter2@db.example/d\"\n");
    assert!(url.len() == 1 && url[0].line == 2 && url[0].text.contains("sslmode=verify-full"), "{url:?}");
    assert!(!url[0].text.contains("hunter2"), "{url:?}");
    for address in ["0.0.0.0:80", "[::]:80"] {
        let listen = warnings(&format!("[server]\nlisten = \"{address}\"\n"));
        assert!(listen.len() == 1 && listen[0].line == 2 && listen[0].text.contains("status_token"), "{listen:?}");
    }
    for right in [
        "[store]\nurl = \"postgres://u:hunter2@db.example/d?sslmode=verify-full\"\n",
        "[store]\nurl = \"postgres://u@localhost/d\"\n",
        "[server]\nlisten = \"0.0.0.0:80\"\nstatus_token = \"env:POSTBOX_STATUS_TOKEN\"\n",
        "[server]\nlisten = \"10.0.0.1:80\"\n",
    ] {
        assert_eq!(warnings(right), [], "{right}");
    }
}

#[test]
fn a_store_s_url_that_no_connection_could_use_is_refused_at_its_line() {
    let found = faults(
        "[store]\nurl = \"postgres://u:hunter2@h:99999/d\"\nlisten_url = \"postgres://u:hunter2@h/d?sslmode=verifyfull\"\n",
    );
    assert_eq!(found.len(), 2, "{found:?}");
    let expected = [("postbox.toml:2: store.url: ", "`port`"), ("postbox.toml:3: store.listen_url: ", "`sslmode`")];
    for (fault, (place, part)) in found.iter().zip(expected) {
        assert!(fault.starts_with(place) && fault.contains(part) && !fault.contains("hunter2"), "{fault}");
    }
}

#[test]
fn a_line_break_around_a_secret_is_named_with_its_variable() {
    let sink = "[subscriptions.a]\nsink = { type = \"http\", ";
    for text in [
        "\n[store]\nurl = \"env:OF_A_FILE\"".to_owned(),
        format!("\n{sink}url = \"env:OF_A_FILE\" }}"),
        format!("\n{sink}url = \"https://h/\", secret = \"env:OF_A_FILE\" }}"),
    ] {
        let found = faults(&text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("postbox.toml:3: ") && !found[0].contains("hunter2"), "{found:?}");
        assert!(found[0].contains("variable OF_A_FILE begins or ends with a line break"), "{found:?}");
    }
    // The value of `--store` and of `POSTBOX_STORE`.
    assert!(crate::check_store_url("sqlite:postbox.db\n").is_err_and(|text| text.contains("line break")));
}

#[test]
fn a_status_token_is_long_and_not_repeated() {
    let token = |text: &str| format!("[server]\nstatus_token = \"{text}\"\n");
    for wrong in ["", "hunter2", "hunter2 hunter2 hunter2", "env:NOT_THERE", "env:BLANK"] {
        let text = fault(&token(wrong));
        assert!(text.starts_with("postbox.toml:2: server.status_token") && !text.contains("hunter2"), "{text}");
    }
    let reading = ReadOptions { delivers: false, ..options() };
    let (config, _) = Config::parse_with(&token("env:NOT_THERE"), reading).expect("a command that only looks");
    assert_eq!(config.server.status_token, None);
    let config = parse(&token("env:POSTBOX_STATUS_TOKEN")).expect("right");
    assert!(config.server.status_token.is_some() && !format!("{config:?}").contains("0123456789abcdef"));
}
