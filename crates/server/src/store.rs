//! Which store a URL means.

use std::path::PathBuf;

/// A store's URL, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// `postgres://…` or `postgresql://…`: the driver reads the whole of it.
    Postgres,
    /// `sqlite:PATH`, `sqlite://PATH` or `sqlite:///PATH`.
    Sqlite(PathBuf),
    /// `memory:`: gone when the program ends.
    Memory,
}

impl StoreUrl {
    /// Takes a URL apart. The message never repeats the URL, which may hold a password.
    pub fn parse(url: &str) -> Result<Self, String> {
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            return Ok(Self::Postgres);
        }
        if let Some(path) = url.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() || path == ":memory:" {
                return Err(
                    "sqlite: needs a file, e.g. \"sqlite:postbox.db\"; for a store without one write \"memory:\""
                        .into(),
                );
            }
            return Ok(Self::Sqlite(path.into()));
        }
        if url == "memory:" {
            return Ok(Self::Memory);
        }
        Err("no such kind of store; write \"postgres://user@host/db\", \"sqlite:PATH\" or \"memory:\"".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_store_has_its_url() {
        assert_eq!(StoreUrl::parse("postgres://h/db"), Ok(StoreUrl::Postgres));
        assert_eq!(StoreUrl::parse("sqlite:a.db"), Ok(StoreUrl::Sqlite("a.db".into())));
        assert_eq!(StoreUrl::parse("sqlite:///tmp/a.db"), Ok(StoreUrl::Sqlite("/tmp/a.db".into())));
        assert_eq!(StoreUrl::parse("memory:"), Ok(StoreUrl::Memory));
        assert!(StoreUrl::parse("sqlite:").is_err());
        assert!(StoreUrl::parse("mysql://u:hunter2@h").is_err_and(|text| !text.contains("hunter2")));
    }
}
