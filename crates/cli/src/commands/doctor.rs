//! `postbox doctor`.

use crate::context::Context;
use crate::failure::Failure;

pub(super) async fn run(_context: &Context, _json: bool) -> Result<(), Failure> {
    Err(Failure::failed("not yet"))
}
