//! The memory store keeps every promise of a store.

use postbox_testkit::conformance::MemoryFixture;

async fn fixture() -> MemoryFixture {
    MemoryFixture::new()
}

postbox_testkit::store_suite!(fixture);
postbox_testkit::apply_suite!(fixture);
