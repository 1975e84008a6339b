//! The Postbox store for SQLite: the embedded default.
