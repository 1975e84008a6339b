//! One error type for every contract: kind, stable code, operation, source.

use std::borrow::Cow;
use std::fmt;

/// Shorthand used by every contract.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error, as a source.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// What kind of thing went wrong. Callers branch on this, never on text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The input breaks a documented limit or form. Permanent; nothing was changed.
    Invalid,
    /// The named thing does not exist.
    NotFound,
    /// The thing exists already in another form (e.g. with another number of lanes).
    Conflict,
    /// The lease or epoch is no longer ours: stop, another relay has the lane.
    Stale,
    /// The other side cannot be reached or refuses everybody. Try later.
    Unavailable,
    /// The other side asks us to slow down.
    RateLimited,
    /// Credentials or a signature were refused.
    Unauthorized,
    /// Schema, cursor or configuration does not fit this program. A person must act.
    Mismatch,
    /// A defect or an unknown failure. Treated as transient with a cap, so that nothing is lost.
    Internal,
}

/// An error with everything a log line or an exit code needs.
///
/// The text says what happened and how to fix it; it never contains a secret.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    code: Cow<'static, str>,
    operation: &'static str,
    message: String,
    source: Option<BoxError>,
}

impl Error {
    /// Creates an error. `operation` is a verb (`"append"`), `code` a stable snake_case word,
    /// `message` one line with the cure.
    pub fn new(
        kind: ErrorKind,
        operation: &'static str,
        code: impl Into<Cow<'static, str>>,
        message: impl Into<String>,
    ) -> Self {
        Self { kind, code: code.into(), operation, message: message.into(), source: None }
    }

    /// Creates an [`ErrorKind::Invalid`] error.
    pub fn invalid(operation: &'static str, code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, operation, code, message)
    }

    const STALE_LEASE: &'static str = "stale_lease";

    /// Creates the error of a lane whose lease is no longer held.
    pub fn stale(operation: &'static str) -> Self {
        Self::new(
            ErrorKind::Stale,
            operation,
            Self::STALE_LEASE,
            "the lane's lease was lost; another relay may hold it",
        )
    }

    const TRANSACTION_ENDED: &'static str = "handler_ended_transaction";

    /// Creates the error of a handler that ended its transaction. Anything it committed stays.
    pub fn transaction_ended(operation: &'static str) -> Self {
        let message = "the handler committed or rolled back its transaction; it must leave that to the store";
        Self::new(ErrorKind::Internal, operation, Self::TRANSACTION_ENDED, message)
    }

    const TRANSACTION_LOST: &'static str = "handler_lost_transaction";

    /// Creates the error of a transaction that was lost while a handler had it: its connection
    /// ended, the handler left a transaction of its own open in it, or the driver rolled it back by
    /// itself. Nothing was committed.
    pub fn transaction_lost(operation: &'static str, why: impl fmt::Display) -> Self {
        let message = format!("the transaction was lost while the handler had it, and nothing of it was kept: {why}");
        Self::new(ErrorKind::Unavailable, operation, Self::TRANSACTION_LOST, message)
    }

    /// Creates the error of an aggregate that is not saved because its version changed since it was
    /// loaded: `UPDATE … WHERE id = … AND version = …` changed no row. A handler that fails with it
    /// is retried.
    pub fn version_conflict(aggregate: &str, key: impl fmt::Display, expected: i64) -> Self {
        let message = format!(
            "{aggregate} {key} is no longer at version {expected}: somebody else has changed it; load it again and repeat the change"
        );
        Self::new(ErrorKind::Conflict, "save", "version_conflict", message)
    }

    /// Creates the error of a payload that breaks the schema of its topic; see
    /// [`Schemas`](crate::Schemas).
    ///
    /// The issues name places and rules but quote nothing of the payload, which may hold a secret.
    pub fn schema_violated(topic: &str, schema_version: u32, issues: &str) -> Self {
        let message = format!("the payload breaks the schema of {topic}, version {schema_version}: {issues}");
        Self::invalid("check", "schema_violated", message)
    }

    /// Attaches the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<BoxError>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Returns the kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the stable snake_case code.
    pub fn code(&self) -> &str {
        &self.code
    }

    /// Returns what was being done.
    pub fn operation(&self) -> &'static str {
        self.operation
    }

    /// Returns the one-line text without operation and source.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns whether trying again cannot help.
    pub fn is_permanent(&self) -> bool {
        !matches!(self.kind, ErrorKind::Unavailable | ErrorKind::RateLimited | ErrorKind::Internal)
    }

    /// Returns whether a store that was given several messages may have refused only one of them: a
    /// trigger of the application, an index or a policy of tenants may refuse a single one.
    pub fn is_refused_alone(&self) -> bool {
        matches!(self.kind, ErrorKind::Invalid | ErrorKind::Conflict | ErrorKind::Internal)
            || ["reference_missing", "tenant_denied"].contains(&self.code())
    }

    /// Returns whether the lease was lost, or what was read under it is outdated.
    pub fn is_stale(&self) -> bool {
        self.kind == ErrorKind::Stale
    }

    /// Returns whether it is [`Self::transaction_lost`].
    pub fn is_transaction_lost(&self) -> bool {
        self.code == Self::TRANSACTION_LOST
    }

    /// Returns whether it is [`Self::transaction_ended`].
    pub fn is_transaction_ended(&self) -> bool {
        self.code == Self::TRANSACTION_ENDED
    }

    /// Returns whether it is [`Self::stale`]: the lease itself is lost, not only what was read
    /// under it.
    pub fn is_lease_lost(&self) -> bool {
        self.is_stale() && self.code == Self::STALE_LEASE
    }
}

/// Returns an [`ErrorKind::Invalid`] error with this code, unless the rule holds.
pub(crate) fn check(holds: bool, code: &'static str, message: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::invalid("validate", code, message())) }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source.as_ref() as _)
    }
}
