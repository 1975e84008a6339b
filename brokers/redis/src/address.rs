//! Parses URLs: the address of a server, or those of Sentinels that know the primary.

use url::Url;

/// The default port of a Sentinel.
const SENTINEL_PORT: u16 = 26_379;

/// The contents of a URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// URLs of the server, or of the Sentinels in the order in which they are asked.
    pub(crate) urls: Vec<String>,
    /// The primary's name in the Sentinels; `None` without Sentinels.
    pub(crate) primary: Option<String>,
    /// The number of the database.
    pub(crate) database: i64,
}

/// Parses a URL. The error never repeats it: it may hold a password.
pub(crate) fn parse(text: &str) -> Result<Address, String> {
    let (scheme, rest) = text.split_once("://").unwrap_or_default();
    let Some(scheme) = scheme.strip_suffix("+sentinel") else {
        let url = server(text)?;
        let database = number(url.path().trim_start_matches('/'))?;
        return Ok(Address { urls: vec![text.to_owned()], primary: None, database });
    };
    let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (primary, database) = path.split_once('/').unwrap_or((path, ""));
    if primary.is_empty() || !primary.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
        return Err(
            "the url names no primary; write redis+sentinel://HOST:PORT,HOST:PORT/NAME, with the name that the \
                    Sentinels have for it"
                .into(),
        );
    }
    let sentinel = |host: &str| {
        let url = format!("{scheme}://{host}");
        let parsed = server(&url)?;
        Ok(if parsed.port().is_none() { format!("{url}:{SENTINEL_PORT}") } else { url })
    };
    let urls = hosts.split(',').map(sentinel).collect::<Result<_, String>>()?;
    Ok(Address { urls, primary: Some(primary.to_owned()), database: number(database)? })
}

/// Checks the address of one server.
fn server(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|error| format!("the url is none ({error}); write redis://HOST:PORT"))?;
    if !matches!(url.scheme(), "redis" | "rediss") || url.host_str().is_none_or(str::is_empty) {
        return Err("the url must begin with redis:// or rediss:// (TLS) and name a host; for Sentinels with \
                    redis+sentinel:// or rediss+sentinel://"
            .into());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("the url holds a user name or password; give them as user and password".into());
    }
    if url.fragment().is_some() || url.query().is_some() {
        return Err("the url has a query or a fragment, which mean nothing here; leave them out".into());
    }
    Ok(url)
}

fn number(database: &str) -> Result<i64, String> {
    match database {
        "" => Ok(0),
        text => text
            .parse::<u32>()
            .map(i64::from)
            .map_err(|_| "the url's path is no number of a database; write redis://HOST:PORT/0, or no path".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked_and_never_repeated() {
        for url in ["redis://h", "redis://127.0.0.1:6379", "rediss://redis.example:6380/3", "redis://[::1]:1/0"] {
            assert_eq!(parse(url).map(|address| address.primary), Ok(None), "{url}");
        }
        for url in [
            "",
            "127.0.0.1:6379",
            "http://h",
            "redis://",
            "redis://canary:canary@h",
            "redis://:canary@h",
            "rediss://h/#insecure",
            "redis://h/?protocol=resp2&canary",
            "redis://h/canary",
            "redis+unix:///canary",
            "http+sentinel://h/canary",
            "redis+sentinel://h",
            "redis+sentinel://h/",
            "redis+sentinel:///canary",
            "redis+sentinel://h,/canary",
            "redis+sentinel://h,u:canary@i/main",
            "redis+sentinel://h/canary canary",
            "redis+sentinel://h/main/canary",
            "redis+sentinel://h/main?canary",
        ] {
            let fault = parse(url).expect_err(url);
            assert!(!fault.contains("canary"), "{fault}");
        }
    }

    #[test]
    fn sentinels_stand_in_one_url() {
        let address = parse("rediss+sentinel://a,b:1,[::1]:2/main-1/3").expect("right");
        let urls = ["rediss://a:26379", "rediss://b:1", "rediss://[::1]:2"].map(str::to_owned).to_vec();
        assert_eq!(address, Address { urls, primary: Some("main-1".into()), database: 3 });
    }
}
