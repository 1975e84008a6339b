//! Parameters of statements, each with the Postgres type of its Rust type. Statements are unnamed
//! and typed: nothing is prepared, so that a pooler in transaction mode works.

use std::borrow::Cow;

use jiff::Timestamp;
use postgres_types::{Kind, ToSql, Type};
use uuid::Uuid;

use crate::text::{AsText, elements};

/// A value and its type.
pub type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// A Rust type with a corresponding Postgres type.
pub trait Typed: ToSql + Sync {
    /// The type of a value.
    const TYPE: Type;
    /// An array of it.
    const ARRAY: Type;
}

macro_rules! typed {
    ($($rust:ty: $one:ident, $array:ident;)*) => {
        $(impl Typed for $rust {
            const TYPE: Type = Type::$one;
            const ARRAY: Type = Type::$array;
        })*
    };
}

typed! {
    bool: BOOL, BOOL_ARRAY;
    i16: INT2, INT2_ARRAY;
    i32: INT4, INT4_ARRAY;
    i64: INT8, INT8_ARRAY;
    &str: TEXT, TEXT_ARRAY;
    String: TEXT, TEXT_ARRAY;
    Cow<'_, str>: TEXT, TEXT_ARRAY;
    &[u8]: BYTEA, BYTEA_ARRAY;
    Uuid: UUID, UUID_ARRAY;
    Timestamp: TIMESTAMPTZ, TIMESTAMPTZ_ARRAY;
}

impl<T: Typed> Typed for Option<T> {
    const TYPE: Type = T::TYPE;
    const ARRAY: Type = T::ARRAY;
}

impl<T: Typed> Typed for &T {
    const TYPE: Type = T::TYPE;
    const ARRAY: Type = T::ARRAY;
}

impl<T: Typed> Typed for Vec<T> {
    const TYPE: Type = T::ARRAY;
    const ARRAY: Type = T::ARRAY;
}

/// One parameter; see `params!`.
pub fn param<T: Typed>(value: &T) -> Param<'_> {
    (value, T::TYPE)
}

/// The parameters of a statement, in their order. Borrows the values.
#[macro_export]
macro_rules! params {
    ($($value:expr),* $(,)?) => { [$($crate::param(&$value)),*] };
}
pub(crate) use params;

/// A value and its type, for any driver.
#[derive(Clone)]
pub struct Bound<'a> {
    value: &'a dyn Value,
    of: Type,
}

/// What every driver can bind.
trait Value: AsText + Sync {
    fn typed(&self) -> &(dyn ToSql + Sync);
}

impl<T: ToSql + AsText + Sync> Value for T {
    fn typed(&self) -> &(dyn ToSql + Sync) {
        self
    }
}

impl<'a> Bound<'a> {
    /// See `bound!`.
    pub fn new<T: Typed + AsText>(value: &'a T) -> Self {
        Self { value, of: T::TYPE }
    }

    /// The parameter for the store's driver.
    pub fn param(&self) -> Param<'a> {
        (self.value.typed(), self.of.clone())
    }

    /// The parameter for a driver that binds texts.
    pub fn text(&self) -> Option<String> {
        self.value.text()
    }

    /// The parameter `$number`, which has that text, as its type.
    pub fn cast(&self, number: &str, text: Option<&str>) -> String {
        let parameter = format!("${number}::text");
        let given = match (self.of.kind(), text) {
            (Kind::Array(_), Some(array)) => elements(&parameter, array),
            _ => parameter,
        };
        format!("{given}::pg_catalog.{}", self.of.name())
    }
}

/// Like `params!`, for any driver.
#[macro_export]
macro_rules! bound {
    ($($value:expr),* $(,)?) => { [$($crate::Bound::new(&$value)),*] };
}
