//! Commands about several stores: asks all of them concurrently and combines the results.

use futures::stream::{StreamExt as _, iter};
use postbox_core::StoreName;
use postbox_server::status;
use serde::Serialize;

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

/// Most stores asked at once: enough that one without an answer delays few others, without opening
/// all at the same moment.
const AT_ONCE_MAX: usize = 32;

/// The commands about one store that texts name. `run` and `check-config` are about all.
const COMMANDS: [&str; 12] = [
    "discard",
    "dispatch",
    "list",
    "migrate",
    "pause",
    "prune",
    "replay",
    "resume",
    "retry",
    "show",
    "stats",
    "subscription",
];

/// The answer of each store, and the failures of those without one.
pub(crate) struct Asked<'a, T> {
    pub(crate) answers: Vec<(&'a Context, T)>,
    pub(crate) ended: Result<(), Failure>,
}

impl<T> Asked<'_, T> {
    /// Whether any store answered, so that there is a list to print, even an empty one. If none
    /// did, an empty list would claim that there is nothing.
    pub(crate) fn is_answered(&self) -> bool {
        !self.answers.is_empty()
    }
}

/// Asks every selected store. A failing store does not keep the others from answering; the failure
/// names it.
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

/// Combines several failures into one; a usage error only if each is one.
pub(crate) fn together(failures: Vec<(&Context, Failure)>) -> Result<(), Failure> {
    if failures.is_empty() {
        return Ok(());
    }
    let is_usage = failures.iter().all(|(_, failure)| matches!(failure, Failure::Usage(_)));
    let mut lines = Vec::with_capacity(failures.len());
    for (context, failure) in failures {
        if context.name.is_none() {
            return Err(failure);
        }
        lines.push(context.named(failure.text()));
    }
    let text = lines.join("\n");
    Err(if is_usage { Failure::usage(text) } else { Failure::failed(text) })
}

/// Adds `--store NAME` to each command in a text. A command ends at a mark of punctuation.
pub(crate) fn with_store(text: &str, store: &StoreName) -> String {
    let mut parts = text.split("postbox ");
    let mut named = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(['`', ';', ',', ')']).into_iter().chain(part.find(" (")).min();
        let (command, rest) = part.split_at(end.unwrap_or(part.len()));
        named.push_str("postbox ");
        named.push_str(command);
        if command.split(' ').next().is_some_and(|word| COMMANDS.contains(&word)) {
            named.push_str(&format!(" --store {store}"));
        }
        named.push_str(rest);
    }
    named
}

/// A remark that is printed once every store has answered.
pub(crate) struct Note {
    pub(crate) text: String,
    /// Whether it is printed with JSON as well; not if the JSON contains it anyway.
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

/// A JSON value with the name of its store, where there are several.
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

/// Prints the rows of several stores, with the store in the first column. With a single store there
/// is no such column.
pub(crate) fn rows(head: &[&str], rows: Vec<(&Context, Vec<String>)>) {
    let Some(first) = rows.first() else { return };
    if first.0.name.is_none() {
        let rows: Vec<_> = rows.into_iter().map(|(_, row)| row).collect();
        return output::rows(head, &rows);
    }
    let head = [&["store"], head].concat();
    let store = |context: &Context| context.name.as_ref().map_or_else(String::new, StoreName::to_string);
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(context, row)| [vec![store(context)], row].concat()).collect();
    output::rows(&head, &rows);
}

/// Fetches the status of the running service, if there is one; it covers all stores.
pub(crate) async fn fetch(contexts: &[Context]) -> Result<Option<status::ServiceStatus>, status::Finding> {
    match contexts.first() {
        Some(context) => status::fetch(&context.config.server).await,
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without the name, a command is refused where there are several.
    #[test]
    fn each_command_in_a_cure_names_its_store() {
        let acme: StoreName = "acme".parse().expect("a name");
        for (text, wanted) in [
            ("start `postbox run`; postbox doctor says more", "start `postbox run`; postbox doctor says more"),
            ("postbox resume a", "postbox resume a --store acme"),
            (
                "look at one with `postbox show ID`, then: postbox retry --code http_422 --subscription o",
                "look at one with `postbox show ID --store acme`, then: postbox retry --code http_422 --subscription o \
                 --store acme",
            ),
            (
                "postbox subscription rename a NEW (if it has begun); or: postbox subscription remove a; otherwise",
                "postbox subscription rename a NEW --store acme (if it has begun); or: postbox subscription remove a \
                 --store acme; otherwise",
            ),
            ("run: postbox migrate up, with the same one", "run: postbox migrate up --store acme, with the same one"),
            ("deliver them first (see: postbox stats)", "deliver them first (see: postbox stats --store acme)"),
        ] {
            assert_eq!(with_store(text, &acme), wanted);
        }
    }
}
