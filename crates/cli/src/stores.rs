//! Commands over all of several stores: what is asked of each, at once, and what is shown of all.

use futures::stream::{StreamExt as _, iter};
use postbox_core::StoreName;
use postbox_server::status;
use serde::Serialize;

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

/// Most stores that are asked at once: one that does not answer delays few others, and opening them
/// all is no storm.
const AT_ONCE_MAX: usize = 32;

/// What each store gave, and at last why some gave nothing.
pub(crate) struct Asked<'a, T> {
    pub(crate) answers: Vec<(&'a Context, T)>,
    pub(crate) ended: Result<(), Failure>,
}

impl<T> Asked<'_, T> {
    /// Whether there is a list to print: of what answered, be it nothing. Where no store did, an
    /// empty list would say that there is nothing.
    pub(crate) fn is_answered(&self) -> bool {
        !self.answers.is_empty()
    }
}

/// Asks every store that is meant. One that fails keeps no other from its answer; the failure says
/// which.
pub(crate) async fn ask_each<'a, T, F>(contexts: &'a [Context], ask: impl Fn(&'a Context) -> F) -> Asked<'a, T>
where
    F: Future<Output = Result<T, Failure>>,
{
    let asked: Vec<_> = iter(contexts.iter().map(|context| {
        let answer = ask(context);
        async move { (context, answer.await) }
    }))
    .buffered(AT_ONCE_MAX)
    .collect()
    .await;
    let (mut answers, mut failures) = (Vec::new(), Vec::new());
    for (context, answer) in asked {
        match answer {
            Ok(answer) => answers.push((context, answer)),
            Err(failure) => failures.push((context, failure)),
        }
    }
    Asked { answers, ended: together(failures) }
}

/// Several failures as one: of the usage only where each of them is.
pub(crate) fn together(failures: Vec<(&Context, Failure)>) -> Result<(), Failure> {
    if failures.is_empty() {
        return Ok(());
    }
    let is_usage = failures.iter().all(|(_, failure)| matches!(failure, Failure::Usage(_)));
    let mut lines = Vec::with_capacity(failures.len());
    for (context, failure) in failures {
        if matches!(failure, Failure::OutputClosed) || context.name.is_none() {
            return Err(failure);
        }
        lines.push(context.named(failure.text()));
    }
    let text = lines.join("\n");
    Err(if is_usage { Failure::usage(text) } else { Failure::failed(text) })
}

/// A remark that is made once every store has answered.
pub(crate) struct Note {
    pub(crate) text: String,
    /// Whether it is made beside JSON, too: not, where that has it anyhow.
    pub(crate) in_json: bool,
}

impl Note {
    pub(crate) fn always(text: String) -> Self {
        Self { text, in_json: true }
    }

    pub(crate) fn for_people(text: String) -> Self {
        Self { text, in_json: false }
    }
}

/// Something of one of several stores, as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct OfStore<'a, T> {
    #[serde(skip_serializing_if = "Option::is_none")]
    store: Option<&'a StoreName>,
    #[serde(flatten)]
    of: T,
}

impl<'a, T> OfStore<'a, T> {
    pub(crate) fn new(context: &'a Context, of: T) -> Self {
        Self { store: context.name.as_ref(), of }
    }
}

/// Rows of several stores: the first column says which. Of a store that is alone, it is not there.
pub(crate) fn rows(head: &[&str], rows: Vec<(&Context, Vec<String>)>) -> Result<(), Failure> {
    let Some(first) = rows.first() else { return Ok(()) };
    if first.0.name.is_none() {
        let rows: Vec<_> = rows.into_iter().map(|(_, row)| row).collect();
        return output::rows(head, &rows);
    }
    let head = [&["store"], head].concat();
    let store = |context: &Context| context.name.as_ref().map_or_else(String::new, StoreName::to_string);
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(context, row)| [vec![store(context)], row].concat()).collect();
    output::rows(&head, &rows)
}

/// The running service, if there is one, for each store what it says of that.
pub(crate) async fn fetch(contexts: &[Context]) -> Option<status::ServiceStatus> {
    status::fetch(&contexts.first()?.config.server).await
}
