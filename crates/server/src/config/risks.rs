//! What is allowed and still a risk. A start warns of it once, and `check-config` at its line.

use postbox_postgres::PostgresConfig;

use super::model::{ServerConfig, StoreConfig};
use crate::store::StoreUrl;

impl StoreConfig {
    /// What is risky about the way to the store. Never repeats the URL.
    pub fn risk(&self) -> Option<&'static str> {
        let url = self.url.expose();
        let unverified = StoreUrl::parse(url) == Ok(StoreUrl::Postgres) && PostgresConfig::new(url).is_unverified();
        unverified.then_some(
            "the database is on another machine and its certificate is not checked, so whoever stands between can read the password and every event; \
             write sslmode=verify-full into the URL (and sslrootcert=FILE for an authority of your own)",
        )
    }
}

impl ServerConfig {
    /// What is risky about where the service listens.
    pub fn risk(&self) -> Option<&'static str> {
        (self.listen.ip().is_unspecified() && self.status_token.is_none()).then_some(
            "it listens on every address of this machine, where everybody can read /metrics and /readyz; write the one address that is needed, \
             or set server.status_token",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{env, fault, parse};
    use super::super::{Config, Reading};

    #[test]
    fn what_is_allowed_and_still_a_risk_is_warned_of_at_its_line() {
        let warnings = |text: &str| parse(text).expect("no faults").warnings;
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
    fn a_status_token_is_long_and_not_repeated() {
        let token = |text: &str| format!("[server]\nstatus_token = \"{text}\"\n");
        for wrong in ["", "hunter2", "hunter2 hunter2 hunter2", "env:NOT_THERE", "env:BLANK"] {
            let text = fault(&token(wrong));
            assert!(text.starts_with("postbox.toml:2: server.status_token ") && !text.contains("hunter2"), "{text}");
        }
        let reading = Reading { env: &env, secrets_needed: false, ..Reading::default() };
        let config = Config::parse_with(&token("env:NOT_THERE"), reading).expect("a command that only looks");
        assert_eq!(config.server.status_token, None);
        let config = parse(&token("env:POSTBOX_STATUS_TOKEN")).expect("right");
        assert!(config.server.status_token.is_some() && !format!("{config:?}").contains("0123456789abcdef"));
    }
}
