//! A database with two tenants, and the roles that work in it.

use std::time::Duration;

use postbox_core::{
    BatchLimit, Disposition, Entry, Filter, Inbound, Log as _, LogName, NewEvent, OwnerId, Receive as _, Settlement,
    SourceName, Subscription, SubscriptionName, Tenant,
};
use postbox_postgres::{PostgresConfig, PostgresStore, Roles};
use postbox_testkit::servers::{PgBouncer, Version};
use tokio_postgres::Client;

use crate::support::{self, Fixture, url_as};

pub(super) const TENANTS: [&str; 2] = ["acme", "o'ther\\"];
/// The subscription of each.
pub(super) const READERS: [&str; 2] = ["acme-out", "other-out"];
pub(super) const LONG: Duration = Duration::from_secs(600);

pub(super) struct World {
    pub(super) fixture: Fixture,
    /// A superuser, to whom no policy applies.
    pub(super) owner: Client,
    /// Appends for the tenant that its session names.
    pub(super) writer: String,
    /// Reads for the tenant that its session names.
    pub(super) reader: String,
    /// Has a relay's rights, for the tenant that its session names.
    pub(super) operator: String,
    /// Works for all tenants.
    pub(super) relay: String,
    poolers: Vec<PgBouncer>,
}

pub(super) fn named(name: &str) -> SubscriptionName {
    SubscriptionName::new(name).expect("a name")
}

/// A subscription to what one tenant has in a log.
pub(super) fn reader_of(tenant: &str, name: &str, log: LogName) -> Subscription {
    let topics = vec!["a".parse().expect("a topic"), "in".parse().expect("a topic")];
    let filter = Filter { topics, tenant: tenant.parse().ok(), ..Filter::default() };
    Subscription { lanes: Some(1), filter, ..Subscription::new(named(name), log) }
}

/// A message from outside.
pub(super) fn inbound(tenant: &str, id: &str, body: &str) -> Inbound {
    Inbound {
        source: SourceName::new("hooks").expect("a name"),
        message_id: id.to_owned(),
        digest: [body.len() as u8; 32],
        event: NewEvent::json("in", body.to_owned()).tenant(tenant),
    }
}

impl World {
    pub(super) async fn new(version: Version) -> Self {
        let fixture = support::on(version).await;
        let owner = fixture.client().await;
        let [writer, reader, operator, relay] = ["writer", "reader", "operator", "relay"]
            .map(|name| format!("tenants_{name}_{}_{}", version.number(), std::process::id()));
        for role in [&writer, &reader, &operator, &relay] {
            owner.batch_execute(&format!("CREATE ROLE {role} LOGIN")).await.expect("a role");
        }
        let world = Self { fixture, owner, writer, reader, operator, relay, poolers: Vec::new() };
        world.grant().await;
        world
    }

    /// Runs what `postbox migrate grants --all-tenants` prints. May be run again.
    pub(super) async fn grant(&self) {
        let Self { writer, reader, operator, relay, .. } = self;
        let roles = Roles {
            writers: vec![writer.clone()],
            relays: vec![relay.clone(), operator.clone()],
            readers: vec![reader.clone()],
            all_tenants: vec![relay.clone()],
        };
        let sql = self.fixture.store.grants(&roles).await.expect("printed");
        self.owner.batch_execute(&sql).await.expect(&sql);
    }

    pub(super) async fn client(&self, role: &str) -> Client {
        support::client(&url_as(&self.fixture.url, role)).await
    }

    /// Returns a store that connects as a role, for one tenant or for none.
    pub(super) async fn store(&self, role: &str, tenant: Option<&str>) -> PostgresStore {
        Self::store_at(&url_as(&self.fixture.url, role), tenant).await
    }

    /// The same, through a pooler in transaction mode that all tenants share.
    pub(super) async fn pooled(&mut self, role: &str, tenant: Option<&str>) -> PostgresStore {
        let pooler = PgBouncer::start_for(&self.fixture.server, &[role]).await;
        let url = url_as(&pooler.url(&self.fixture.url), role);
        self.poolers.push(pooler);
        Self::store_at(&url, tenant).await
    }

    async fn store_at(url: &str, tenant: Option<&str>) -> PostgresStore {
        let tenant = tenant.map(|tenant| Tenant::new(tenant).expect("a tenant"));
        PostgresStore::connect(PostgresConfig { tenant, ..PostgresConfig::new(url) }).await.expect("connected")
    }

    /// Gives both tenants events in every state, of one subscription per tenant and of a shared
    /// one, and received messages with conflicts.
    pub(super) async fn filled(&self) {
        self.filled_by(&self.store(&self.relay, None).await).await;
    }

    /// Does the same with this store, which works for all tenants.
    pub(super) async fn filled_by(&self, relay: &PostgresStore) {
        let outbox = LogName::outbox();
        for (tenant, name) in TENANTS.into_iter().zip(READERS) {
            relay.subscribe(&reader_of(tenant, name, outbox.clone())).await.expect("made");
            let operator = self.store(&self.operator, Some(tenant)).await;
            for (id, body) in [("1", "x"), ("1", "xy"), ("2", "x")] {
                operator.receive(&LogName::inbox(), inbound(tenant, id, body)).await.expect("received");
            }
            let once = "INSERT INTO postbox.once (source, message_id) VALUES ('s', 'm')";
            let client = self.client(&self.operator).await;
            within(&client, tenant, once).await.expect("applied");
            let asleep = "INSERT INTO postbox.sleeper (log, owner, asleep_until) SELECT 'outbox', current_setting('postbox.tenant'), 'infinity'";
            within(&client, tenant, asleep).await.expect("declared");
        }
        relay
            .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(named("shared"), outbox.clone()) })
            .await
            .expect("made");
        // The subscription moves to another tenant. The rows it already has belong to both.
        let moved = |tenant: &str| Filter { tenant: tenant.parse().ok(), ..Filter::default() };
        let moved = |tenant| Subscription {
            lanes: Some(1),
            filter: moved(tenant),
            ..Subscription::new(named("moved"), outbox.clone())
        };
        relay.subscribe(&moved(TENANTS[1])).await.expect("made");
        self.append_for_both().await;
        for name in ["acme-out", "other-out", "shared", "moved"] {
            self.settle(relay, name).await;
        }
        relay.subscribe(&moved(TENANTS[0])).await.expect("changed");
        self.append_for_both().await;
    }

    async fn append_for_both(&self) {
        for tenant in TENANTS {
            let writer = self.store(&self.writer, Some(tenant)).await;
            let events = ["1", "2", "3", "4"]
                .map(|payload| NewEvent::json("a", payload.repeat(50_000)).key(payload).tenant(tenant));
            postbox_core::Append::append(&writer, &LogName::outbox(), &events).await.expect("appended");
        }
    }

    /// Settles what is there: the first event dead, the second for a later retry, the rest
    /// delivered.
    pub(super) async fn settle(&self, relay: &PostgresStore, name: &str) {
        let owner = OwnerId::new("test").expect("a name");
        let lease = relay.acquire(&named(name), &owner, &[], LONG).await.expect("acquired").lease.expect("a free lane");
        let batch = relay.next_batch(&lease, BatchLimit::default()).await.expect("read");
        let dead = Disposition::Dead { code: "http_422".into(), error: "never".into(), halt: false, took: None };
        let retry =
            Disposition::Retry { after: LONG, counted: true, code: "http_500".into(), error: "no".into(), took: None };
        let entries = batch.deliveries.iter().zip([dead, retry]);
        let entries = entries.map(|(delivery, disposition)| Entry { delivery, disposition }).collect();
        let settlement = Settlement { position: batch.end, entries, rewind: false, hold_keys: true };
        relay.settle(&lease, settlement).await.expect("settled");
        relay.release(&lease).await.expect("released");
    }

    pub(super) async fn end(self) {
        drop(self.poolers);
        for role in [&self.writer, &self.reader, &self.operator, &self.relay] {
            self.owner.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.expect("cleaned up");
        }
    }
}

/// Runs a statement in a transaction for a tenant. Returns the number of rows.
pub(super) async fn within(client: &Client, tenant: &str, sql: &str) -> Result<u64, tokio_postgres::Error> {
    client.batch_execute("BEGIN").await?;
    let name = "SELECT set_config('postbox.tenant', $1, true)";
    client.execute_typed(name, &[(&tenant, tokio_postgres::types::Type::TEXT)]).await?;
    let done = client.execute_typed(sql, &[]).await;
    client.batch_execute("COMMIT").await?;
    done
}
