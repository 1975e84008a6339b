//! Runs every contract's suite against the store: on the oldest and newest Postgres we support, and
//! through a transaction-mode pooler.

mod support;

mod postgres_15 {
    use postbox_testkit::servers::Version;

    async fn fixture() -> super::support::Fixture {
        super::support::on(Version::V15).await
    }

    postbox_testkit::store_suite!(fixture);
    postbox_testkit::apply_suite!(fixture);
    postbox_testkit::transact_suite!(fixture);
}

mod postgres_18 {
    use postbox_testkit::servers::Version;

    async fn fixture() -> super::support::Fixture {
        super::support::on(Version::V18).await
    }

    postbox_testkit::store_suite!(fixture);
    postbox_testkit::apply_suite!(fixture);
    postbox_testkit::transact_suite!(fixture);
}

mod pgbouncer {
    use super::support::pooled as fixture;

    postbox_testkit::store_suite!(fixture);
    postbox_testkit::apply_suite!(fixture);
    postbox_testkit::transact_suite!(fixture);
}
