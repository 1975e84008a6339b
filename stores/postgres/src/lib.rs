//! The Postbox store for PostgreSQL: an append-only log whose cursor is a snapshot.
