//! Why a command failed, and its exit code.

use std::error::Error as _;
use std::io::Write as _;
use std::process::ExitCode;

use postbox_core::ErrorKind;
use postbox_server::LoadError;
use postbox_server::text::safe_line;

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Exit code 1: it was tried and failed.
    Failed(String),
    /// Exit code 2: wrong usage or configuration; nothing was tried.
    Usage(String),
}

impl Failure {
    pub(crate) fn failed(text: impl Into<String>) -> Self {
        Self::Failed(text.into())
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self::Usage(text.into())
    }

    /// The message.
    pub(crate) fn text(&self) -> &str {
        let (Self::Failed(text) | Self::Usage(text)) = self;
        text
    }

    /// Prints the message and returns the exit code.
    pub(crate) fn report(self) -> ExitCode {
        let code = match self {
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
        };
        let mut stderr = std::io::stderr().lock();
        for line in self.text().lines() {
            // If standard error is closed as well, nothing can be done.
            let _ = writeln!(stderr, "postbox: {}", safe_line(line));
        }
        ExitCode::from(code)
    }
}

/// Errors that may be temporary, and after which nothing was committed all the same. `store_error`
/// is an answer of the database, for example of a trigger.
const REFUSED: [&str; 4] = ["store_read_only", "store_full", "store_error", "table_locked"];

/// Whether a write that failed with this error committed nothing. After another error nobody knows.
pub(crate) fn is_refused(error: &postbox_core::Error) -> bool {
    error.is_permanent() || REFUSED.contains(&error.code())
}

impl From<postbox_core::Error> for Failure {
    fn from(error: postbox_core::Error) -> Self {
        let mut text = error.message().to_owned();
        let mut cause = error.source();
        while let Some(source) = cause {
            let said = source.to_string();
            if says_more(&text, &said) {
                text.push_str(": ");
                text.push_str(&said);
            }
            cause = source.source();
        }
        // One line, even if the database's message has several.
        let text =
            text.split(['\n', '\r']).map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
        let text = format!("{text} ({})", error.code());
        // "Not found" concerns a name on the command line, so it is a usage error.
        if error.kind() == ErrorKind::NotFound { Self::Usage(text) } else { Self::Failed(text) }
    }
}

/// Whether a cause adds something: the text does not contain it yet, with or without its operation,
/// and it is not a driver's bare "db error".
fn says_more(text: &str, cause: &str) -> bool {
    let plain = cause.split_once(": ").map_or(cause, |(_, rest)| rest);
    cause != "db error" && !text.contains(cause) && !text.contains(plain)
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        Self::Usage(error.to_string())
    }
}
