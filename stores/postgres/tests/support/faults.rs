//! Faults in calls of a store, injected between it and the server (or the pooler), and inside the
//! server.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use postbox_core::Store;
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_testkit::conformance::faults::{Asked, Call, CallFaults, Late, Place};
use postbox_testkit::proxy::{FaultProxy, Harm, Point, Trap};
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use super::{PATIENCE, WORKER, client, connected, patient};

/// Stops only the first update after `gate` was reset, before it looks for its row.
const GATE: &str = "
CREATE SEQUENCE gate START 2;
CREATE FUNCTION pass_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF nextval('public.gate') = 1 THEN PERFORM pg_advisory_xact_lock(4711); END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER gate BEFORE UPDATE ON postbox.lane FOR EACH STATEMENT EXECUTE FUNCTION public.pass_gate()";
/// Counts sessions that wait for anything but the gate.
const WAITING: &str = "
SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
WHERE a.datname = current_database() AND NOT l.granted AND NOT (l.locktype = 'advisory' AND l.objid = 4711)";
const AT_GATE: &str = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory' AND objid = 4711
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";

pub struct PostgresFaults {
    store: PostgresStore,
    owner: PostgresStore,
    proxy: FaultProxy,
    /// The URL that the store uses, through the proxy.
    pub url: String,
    /// A connection without the proxy. It holds the gate and sees what waits.
    direct: Arc<Client>,
}

impl PostgresFaults {
    /// `front` is what the store talks to, a server or a pooler, and `owner_front` the same for the
    /// owner. `url` is the server.
    pub async fn new(front: &str, owner_front: &str, url: &str) -> Self {
        let proxy = FaultProxy::in_front_of(front).await;
        let proxied = proxy.url(front);
        let store = connected(PostgresConfig::new(&proxied)).await;
        let owner = patient(PostgresConfig::new(proxy.url(owner_front)));
        let owner = PostgresStore::new(owner).expect("a store");
        let direct = client(url).await;
        let gate = format!("{GATE}; GRANT USAGE ON SEQUENCE gate TO {WORKER}");
        direct.batch_execute(&gate).await.expect("a gate");
        Self { store, owner, proxy, url: proxied, direct: Arc::new(direct) }
    }

    pub fn postgres(&self) -> &PostgresStore {
        &self.store
    }

    fn trap(&self, call: Call, place: Place, harm: Harm) -> Trap {
        let writes = "READ WRITE".to_owned();
        self.proxy.trap(
            match (call, place) {
                (Call::Receive, _) => Point::Statement("_receive".to_owned()),
                (_, Place::End) => Point::CommitOf(writes),
                _ => Point::Statement(writes),
            },
            harm,
        )
    }
}

#[async_trait]
impl CallFaults for PostgresFaults {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn again(&self) -> Arc<dyn Store> {
        self.store()
    }

    fn stores(&self, call: Call) -> [Arc<dyn Store>; 2] {
        match call {
            Call::Up | Call::Down => {
                let owner: Arc<dyn Store> = Arc::new(self.owner.clone());
                [owner.clone(), owner]
            }
            _ => [self.store(), self.again()],
        }
    }

    fn places(&self, call: Call) -> &'static [Place] {
        match call {
            Call::Acquire | Call::Renew | Call::Release | Call::NextBatch | Call::SettleAndRead => {
                &[Place::Start, Place::Middle, Place::End]
            }
            // A settlement reads the lane's row by locking it, so from there on only the end is
            // left.
            Call::Append | Call::Position => &[Place::Start, Place::End],
            Call::Receive | Call::Leave => &[Place::Start],
            // These calls make several round trips between BEGIN and COMMIT. Stopped earlier, they
            // would have no effect.
            _ => &[Place::End],
        }
    }

    async fn lose_answer(&self, call: Call, asked: Asked) {
        let trap = self.trap(call, Place::End, Harm::LoseAnswer);
        let error = asked.await.unwrap_or_else(|| panic!("{call:?} was answered: {trap:?}"));
        assert!(!error.is_permanent(), "{error:?}");
        trap.sprung().await;
        let answer = trap.answer().await;
        let done = answer.last().is_some_and(|tag| tag == "COMMIT" || call == Call::Receive);
        assert!(done, "{call:?} was not done: {answer:?}");
    }

    async fn delay(&self, call: Call, place: Place, asked: Asked) -> Box<dyn Late> {
        let trap = self.trap(call, place, Harm::Delay);
        if place == Place::Middle {
            self.direct.batch_execute("SELECT pg_advisory_lock(4711), setval('gate', 1, false)").await.expect("shut");
        }
        let error = asked.await.unwrap_or_else(|| panic!("{call:?} was answered: {trap:?}"));
        assert!(!error.is_permanent(), "{error:?}");
        trap.sprung().await;
        let stands = match place {
            // It goes on in the server, without its client, as far as the gate.
            Place::Middle => {
                let answer = tokio::spawn(async move { trap.release().await });
                tokio::time::timeout(PATIENCE, until(&self.direct, AT_GATE)).await.expect("it comes to the gate");
                Stands::AtGate(answer)
            }
            _ => Stands::InProxy(trap),
        };
        Box::new(Stopped { call, stands, direct: self.direct.clone() })
    }
}

enum Stands {
    InProxy(Trap),
    AtGate(JoinHandle<Vec<String>>),
}

struct Stopped {
    call: Call,
    stands: Stands,
    direct: Arc<Client>,
}

#[async_trait]
impl Late for Stopped {
    async fn after(self: Box<Self>, meanwhile: BoxFuture<'static, ()>) {
        let Self { call, stands, direct } = *self;
        let mut meanwhile = tokio::spawn(meanwhile);
        let done = tokio::select! {
            done = &mut meanwhile => Some(done),
            () = until(&direct, WAITING) => None,
        };
        let answer = match stands {
            Stands::InProxy(trap) => trap.release().await,
            Stands::AtGate(answer) => {
                direct.batch_execute("SELECT pg_advisory_unlock(4711)").await.expect("opened");
                answer.await.expect("no panic")
            }
        };
        assert!(!answer.is_empty(), "{call:?} was never answered");
        let done = match done {
            Some(done) => done,
            None => meanwhile.await,
        };
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
    }
}

/// Waits until a session waits.
async fn until(direct: &Client, waiting: &str) {
    while direct.query_one(waiting, &[]).await.expect("asked").get::<_, i64>(0) == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
