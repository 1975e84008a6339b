//! `postbox run`.

use crate::context::Context;
use crate::failure::Failure;

pub(super) async fn run(_context: Context) -> Result<(), Failure> {
    Err(Failure::failed("not yet"))
}
