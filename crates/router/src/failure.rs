//! Turns a handler's error into the outcome of the event.

use std::any::Any;
use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use postbox_core::Outcome;

/// The code of an error that is retried.
const HANDLER_ERROR: &str = "handler_error";
/// The code of an error that a rule selected.
const HANDLER_REFUSED: &str = "handler_refused";

/// A handler error that chooses the outcome of the event. It may be anywhere in the chain of causes
/// of another error, or a context of an `anyhow::Error`, so `?` works with it. It is then the whole
/// outcome: rules, and texts around it, do not count. An error that is `#[error(transparent)]`
/// hides it.
///
/// ```
/// # use std::time::Duration;
/// # use postbox_router::Failure;
/// Failure::dead("address_unknown", "there is no such customer");
/// Failure::retry("printer_busy", "ask again").after(Duration::from_secs(30));
/// Failure::unavailable("mail_server_down", "nobody answers");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure(Outcome);

impl Failure {
    /// The event may succeed later. `code` is a stable snake_case word.
    pub fn retry(code: impl Into<Cow<'static, str>>, error: impl fmt::Display) -> Self {
        Self(Outcome::retry(code, error.to_string()))
    }

    /// The event can never succeed.
    pub fn dead(code: impl Into<Cow<'static, str>>, error: impl fmt::Display) -> Self {
        Self(Outcome::dead(code, error.to_string()))
    }

    /// What the handler needs is down, for every event. No attempt is counted, the subscription
    /// waits, and a single event then probes whether it is back: as with
    /// [`Outcome::Unavailable`], also in a transaction. An event that alone finds it down, again
    /// and again, is charged in the end.
    pub fn unavailable(code: impl Into<Cow<'static, str>>, error: impl fmt::Display) -> Self {
        Self(Outcome::unavailable(code, error.to_string()))
    }

    /// Sets the shortest wait before the retry, up to the `delay_max` of the subscription's
    /// [`RetryPolicy`](postbox_core::RetryPolicy) (3 hours by default). Has no effect on the other
    /// outcomes.
    #[must_use]
    pub fn after(mut self, wait: Duration) -> Self {
        if let Outcome::Retry { after, .. } = &mut self.0 {
            *after = Some(wait);
        }
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.failure().map_or("", |(_, error)| error))
    }
}

impl StdError for Failure {}

/// Which errors make an event dead; see [`Router::dead_on`](crate::Router::dead_on).
#[derive(Default, Clone)]
pub struct FailureRules(Vec<Arc<Rule>>);

type Rule = dyn Fn(Failed<'_>) -> bool + Send + Sync;

/// A handler's error. What is a context of an `anyhow::Error` is not found in its chain.
#[derive(Clone, Copy)]
enum Failed<'e> {
    Standard(&'e (dyn StdError + 'static)),
    Anyhow(&'e anyhow::Error),
}

impl<'e> Failed<'e> {
    /// Returns it and its causes.
    fn chain(self) -> Chain<'e> {
        Chain(Some(match self {
            Self::Standard(error) => error,
            Self::Anyhow(error) => error.as_ref(),
        }))
    }

    /// Returns all errors of a type in it.
    fn all<E: StdError + Send + Sync + 'static>(self) -> impl Iterator<Item = &'e E> {
        let context = match self {
            Self::Standard(_) => None,
            Self::Anyhow(error) => error.downcast_ref(),
        };
        context.into_iter().chain(self.chain().filter_map(|error| error.downcast_ref()))
    }
}

impl FailureRules {
    pub(crate) fn dead_on<E: StdError + Send + Sync + 'static>(
        &mut self,
        picks: impl Fn(&E) -> bool + Send + Sync + 'static,
    ) {
        self.0.push(Arc::new(move |failed| failed.all::<E>().any(&picks)));
    }

    pub(crate) fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    /// Returns the outcome for a handler error and its causes.
    fn judge(&self, failed: Failed<'_>) -> Outcome {
        if let Some(Failure(outcome)) = failed.all().next() {
            return outcome.clone();
        }
        let text = failed.chain().map(ToString::to_string).collect::<Vec<_>>().join(": ");
        match self.0.iter().any(|picks| picks(failed)) {
            true => Outcome::dead(HANDLER_REFUSED, text),
            false => Outcome::retry(HANDLER_ERROR, text),
        }
    }
}

/// What a handler may fail with: any standard error, a [`Failure`] among them, or an
/// `anyhow::Error`.
///
/// `Kind` separates these for the compiler. It is inferred.
#[diagnostic::on_unimplemented(
    message = "a handler cannot fail with `{Self}`",
    note = "it can with any `std::error::Error`, an `anyhow::Error`, or a `postbox::router::Failure`"
)]
pub trait IntoFailure<Kind>: Sized {
    /// Returns the outcome of the event.
    fn into_outcome(self, rules: &FailureRules) -> Outcome;
}

/// Marks standard errors.
#[derive(Debug)]
pub enum Standard {}
/// Marks `anyhow` errors.
#[derive(Debug)]
pub enum Anyhow {}

/// An error and its causes.
#[derive(Clone)]
struct Chain<'e>(Option<&'e (dyn StdError + 'static)>);

impl<'e> Iterator for Chain<'e> {
    type Item = &'e (dyn StdError + 'static);

    fn next(&mut self) -> Option<Self::Item> {
        let error = self.0?;
        self.0 = error.source();
        Some(error)
    }
}

impl<E: StdError + 'static> IntoFailure<Standard> for E {
    fn into_outcome(self, rules: &FailureRules) -> Outcome {
        rules.judge(Failed::Standard(&self))
    }
}

impl IntoFailure<Anyhow> for anyhow::Error {
    fn into_outcome(self, rules: &FailureRules) -> Outcome {
        rules.judge(Failed::Anyhow(&self))
    }
}

/// Returns the outcome of an error, or a text, of a handler without a router.
pub(crate) fn unruled<E: Into<Box<dyn StdError + Send + Sync>> + 'static>(error: E) -> Outcome {
    let rules = FailureRules::default();
    // In a box, contexts are hidden.
    if let Some(error) = (&error as &dyn Any).downcast_ref() {
        return rules.judge(Failed::Anyhow(error));
    }
    let error: Box<dyn StdError + Send + Sync> = error.into();
    rules.judge(Failed::Standard(&*error))
}
