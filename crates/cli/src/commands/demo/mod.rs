//! `postbox demo`.

use crate::failure::Failure;

/// What can be asked of the demo.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// How many orders the shop takes
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    orders: u64,
}

pub(super) async fn run(args: DemoArgs) -> Result<(), Failure> {
    Err(Failure::failed(format!("not yet {}", args.orders)))
}
