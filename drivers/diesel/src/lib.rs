#![doc = include_str!("../README.md")]

mod classify;
#[cfg(feature = "libpq")]
mod connection;

pub use classify::classify;
#[cfg(feature = "libpq")]
pub use connection::Diesel;
use diesel::pg::Pg;
use diesel::query_builder::{BoxedSqlQuery, SqlQuery};
use diesel::sql_types::{Nullable, Text};

/// Returns a statement with its parameters, ready to execute; also for drivers built on `diesel`.
pub fn query(sql: String, texts: Vec<Option<String>>) -> BoxedSqlQuery<'static, Pg, SqlQuery> {
    let query = diesel::sql_query(sql).into_boxed();
    texts.into_iter().fold(query, |query, text| query.bind::<Nullable<Text>, _>(text))
}
