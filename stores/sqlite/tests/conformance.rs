//! Runs every suite that a store must pass, on a real file.

mod common;

use common::fixture;

postbox_testkit::store_suite!(fixture);
postbox_testkit::apply_suite!(fixture);
postbox_testkit::transact_suite!(fixture);
