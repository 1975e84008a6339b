//! `postbox migrate print --for TOOL`: the schema as a migration of another tool.

use std::io::ErrorKind;
use std::path::Path;

use clap::ValueEnum;
use jiff::Timestamp;
use postbox_server::ToolScripts;

use crate::context::Context;
use crate::failure::Failure;
use crate::{files, output};

/// Tools that migrate a Postgres database.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Tool {
    Sqlx,
    Diesel,
    Refinery,
    Flyway,
    Alembic,
}

/// A file with the name and content that the tool expects.
struct MigrationFile {
    name: String,
    text: String,
}

impl Tool {
    /// Versions are timestamps, as these tools number their own files. A version of Refinery has 31
    /// bits, so there it is 1.
    fn files(self, scripts: ToolScripts, at: Timestamp) -> Vec<MigrationFile> {
        let ToolScripts { up, down } = scripts;
        let file = |name: String, text: String| MigrationFile { name, text };
        let version = at.strftime("%Y%m%d%H%M%S");
        match self {
            Self::Sqlx => {
                vec![file(format!("{version}_postbox.up.sql"), up), file(format!("{version}_postbox.down.sql"), down)]
            }
            Self::Diesel => {
                let folder = at.strftime("%Y-%m-%d-%H%M%S_postbox");
                vec![file(format!("{folder}/up.sql"), up), file(format!("{folder}/down.sql"), down)]
            }
            // Refinery has no down migrations, and Flyway only in its paid edition.
            Self::Refinery => vec![file("V1__postbox.sql".to_owned(), up)],
            Self::Flyway => vec![file(format!("V{version}__postbox.sql"), up)],
            Self::Alembic => {
                let text = ALEMBIC
                    .replace("{version}", &version.to_string())
                    .replace("{up}", &python_text(&up))
                    .replace("{down}", &python_text(&down));
                vec![file(format!("{version}_postbox.py"), text)]
            }
        }
    }
}

/// `op.execute` would parse `:name` as a parameter, and a driver `%`. Asyncpg executes one
/// statement at a time.
const ALEMBIC: &str = r#""""Postbox"""

from alembic import op

revision = "{version}"
down_revision = None  # what this comes after: alembic heads
branch_labels = None
depends_on = None

UP = """\
{up}"""

DOWN = """\
{down}"""


def upgrade() -> None:
    run(UP)


def downgrade() -> None:
    run(DOWN)


def run(script: str) -> None:
    # As it is: op.execute would read ":name" as a parameter. One statement: asyncpg takes no more.
    whole = f"DO $alembic$ BEGIN EXECUTE $script${script}$script$; END $alembic$"
    op.get_bind().exec_driver_sql(whole, execution_options={"no_parameters": True})
"#;

/// Escapes a text for a triple-quoted Python string.
fn python_text(text: &str) -> String {
    text.replace('\\', r"\\").replace("\"\"\"", r#"\"\"\""#).replace('\r', r"\r")
}

pub(super) fn run(context: &Context, tool: Tool, out: Option<&Path>) -> Result<(), Failure> {
    let files = tool.files(postbox_server::tool_scripts(&context.config.store)?, Timestamp::now());
    let Some(out) = out else {
        // A single file is printed alone, so that it can be redirected into a file of that name.
        let shown = match &files[..] {
            [file] => file.text.clone(),
            files => files.iter().map(|file| format!("==> {} <==\n{}\n", file.name, file.text)).collect(),
        };
        output::print(&shown);
        return Ok(());
    };
    for file in &files {
        let path = out.join(&file.name);
        write_new(&path, &file.text)?;
        output::line(&format!("wrote {}", path.display()));
    }
    Ok(())
}

/// Creates a file, and its folder. Fails if the file exists.
pub(super) fn write_new(path: &Path, text: &str) -> Result<(), Failure> {
    let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    let written = folder.and_then(|()| files::write(path, text, 0o666, false));
    written.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => {
            Failure::failed(format!("{} exists already; move it away, or choose another folder", path.display()))
        }
        _ => Failure::failed(format!("{} cannot be written: {error}", path.display())),
    })
}
