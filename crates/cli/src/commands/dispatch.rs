//! `postbox dispatch`.

use crate::context::Context;
use crate::failure::Failure;

pub(super) async fn run(_context: &Context, _limit: Option<u64>, _forever: bool) -> Result<(), Failure> {
    Err(Failure::failed("not yet"))
}
