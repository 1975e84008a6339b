//! `postbox completions SHELL`.

use clap::CommandFactory as _;

use crate::args::Args;
use crate::output;

pub(super) fn run(shell: clap_complete::Shell) {
    // Generated into memory first: the generator panics when it cannot write (`postbox completions
    // bash | head`).
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "postbox", &mut script);
    output::print(&String::from_utf8_lossy(&script));
}
