//! What an operator changes: retry, discard, mark dead, replay, pause.
//!
//! Every change of delivery rows first locks the subscription's lanes, as settling does, so that
//! two transactions never decide at once which row of a key is next.

use async_trait::async_trait;
use postbox_core::kit::check_lanes;
use postbox_core::{
    Admin, Change, Changed, Pause, Replay, Replayed, ResetPlan, ResetTo, Result, Selection, Seq, SubscriptionName,
};
use postbox_postgres_sql::params;
use uuid::Uuid;

use crate::PostgresStore;
use crate::criteria::Meant;
use crate::lifecycle;
use crate::log::micros;
use crate::session::Session;

/// Locks the cursor of every lane: see `0001_operate.sql`.
const LANE_LOCK: &str = "SELECT {s}.lock_lanes($1)";

/// One step of a change: see `0001_operate.sql`.
const DELIVERY_CHANGE: &str =
    "SELECT changed, next_seq FROM {s}.change($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)";

/// Pauses or resumes: see `0001_operate.sql`.
const SUBSCRIPTION_PAUSE: &str = "SELECT {s}.pause($1, $2, $3, $4)";
/// See [`SUBSCRIPTION_PAUSE`].
const SUBSCRIPTION_RESUME: &str = "SELECT {s}.resume($1)";

/// Only the first row of a key may have a due time: its followers wait for their turn. Without
/// this, a thousand rows of one key that are due but not first would delay all other keys. Index:
/// `delivery_held`, then the primary key. Locks the rows.
///
/// `OFFSET 0`, `ORDER BY` and the update by `ctid` force this plan, whatever the statistics say.
/// Statistics of a table of dead rows say that no row holds its key. Comparing all rows that do
/// with each of the keys then looks cheap.
pub(crate) const CLEAR_FOLLOWER_DUE: &str = "{clear_follower_due}";

#[async_trait]
impl Admin for PostgresStore {
    async fn change(&self, subscription: &SubscriptionName, change: &Change, selection: &Selection) -> Result<Changed> {
        selection.validate(change.operation())?;
        let step = async |session: &Session| change_rows(session, change, subscription, selection).await;
        self.change_or_look(change.operation(), selection.dry_run, step).await
    }

    async fn replay(&self, subscription: &SubscriptionName, replay: &Replay) -> Result<Replayed> {
        replay.validate()?;
        let step = async |session: &Session| crate::replay::replay(session, subscription, replay).await;
        self.change_or_look("replay", replay.dry_run, step).await
    }

    async fn pause(&self, subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()> {
        let name = subscription.as_str();
        let set = async |session: &Session| match pause {
            Some(Pause { until, by, why }) => {
                session.rows(&session.sql(SUBSCRIPTION_PAUSE), &params![name, why, until, by]).await.map(drop)
            }
            None => session.rows(&session.sql(SUBSCRIPTION_RESUME), &params![name]).await.map(drop),
        };
        self.write("pause", &self.inner.modes.change, set).await
    }

    async fn rename(&self, subscription: &SubscriptionName, generation: i64, to: &SubscriptionName) -> Result<()> {
        self.for_all_tenants("rename")?;
        let rename = async |session: &Session| lifecycle::rename(session, subscription, generation, to).await;
        self.write("rename", &self.inner.modes.change, rename).await
    }

    async fn remove(&self, subscription: &SubscriptionName, generation: i64) -> Result<()> {
        self.for_all_tenants("remove")?;
        let remove = async |session: &Session| lifecycle::remove(session, subscription, generation).await;
        self.write("remove", &self.inner.modes.change, remove).await
    }

    async fn reset(&self, subscription: &SubscriptionName, to: ResetTo, stamp: Option<&str>) -> Result<ResetPlan> {
        let Some(stamp) = stamp else {
            let plan = async |session: &Session| lifecycle::plan(session, subscription, to).await;
            return self.report("reset", plan).await;
        };
        self.for_all_tenants("reset")?;
        let reset = async |session: &Session| lifecycle::reset(session, subscription, to, stamp).await;
        self.write("reset", &self.inner.modes.change, reset).await
    }

    async fn set_lanes(&self, subscription: &SubscriptionName, lanes: u16) -> Result<()> {
        check_lanes("set_lanes", subscription, lanes)?;
        self.for_all_tenants("set_lanes")?;
        let set = async |session: &Session| lifecycle::set_lanes(session, subscription, lanes).await;
        self.write("set_lanes", &self.inner.modes.write, set).await
    }
}

impl PostgresStore {
    /// Runs changes in one transaction, which commits if they succeed.
    pub(crate) async fn write<T>(
        &self,
        operation: &'static str,
        mode: &str,
        write: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        let changed = self.call(operation, async |session: &Session| session.step_by_step(mode, write).await).await?;
        self.wake();
        Ok(changed)
    }

    /// Runs a step over delivery rows, or only its reads for a dry run. It waits for a lock no
    /// longer than a relay, and says who holds it: whoever waits for the answer can end that.
    async fn change_or_look<T>(
        &self,
        operation: &'static str,
        dry_run: bool,
        step: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        self.with_lock_named(match dry_run {
            true => self.dry_run(operation, step).await,
            false => self.write(operation, &self.inner.modes.relay, step).await,
        })
        .await
    }

    /// Runs the reading part of a change.
    pub(crate) async fn dry_run<T>(
        &self,
        operation: &'static str,
        step: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        self.call(operation, async |session: &Session| session.step_by_step(&self.inner.modes.dry_run, step).await)
            .await
    }
}

/// Locks the lanes of a subscription, even if they are replaced by others meanwhile.
pub(crate) async fn lock_lanes(session: &Session, subscription: i32) -> Result<()> {
    session.rows(&session.sql(LANE_LOCK), &params![subscription]).await.map(drop)
}

/// Runs one step over delivery rows.
async fn change_rows(
    session: &Session,
    change: &Change,
    subscription: &SubscriptionName,
    selection: &Selection,
) -> Result<Changed> {
    let ids: Option<Vec<Uuid>> = selection.ids.as_ref().map(|ids| ids.iter().map(|id| id.as_uuid()).collect());
    let Meant { topic, key, since, until, tenant } = Meant::by(&selection.which);
    let (after, limit) = (selection.after.map_or(0, |after| after.0), selection.step_max() as i64);
    let (name, code, dry_run) = (subscription.as_str(), &selection.code, selection.dry_run);
    let (action, dead_for, note) = (change.operation(), selection.dead_for.map(micros), change.note(selection));
    let params =
        params![action, name, ids, topic, key, since, until, code, after, limit, dry_run, tenant, dead_for, note];
    let row = session.row(&session.sql(DELIVERY_CHANGE), &params).await?;
    Ok(Changed { count: row.get::<_, i64>(0).unsigned_abs(), next: row.get::<_, Option<i64>>(1).map(Seq) })
}
