//! The sink: a call hands all its events to one connection, then waits for their PUBACKs.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Capabilities, Delivery, Down, Outcome, Sink, lock};
use rumqttc::Outgoing;
use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{Packet, PubAckReason, Publish};
use rumqttc::v5::{AsyncClient, Event, EventLoop};
use tokio::sync::{Mutex as AsyncMutex, oneshot};
use tokio::time::{Instant, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use crate::config::MqttSinkTable;
use crate::connection::Server;
use crate::{classify, message, topic};

/// The most events of a call. Servers process fewer than that at once.
const BATCH_MAX: usize = 100;
/// How many calls run at once, unless the subscription sets it. They share the connection.
const CONCURRENCY: usize = 4;
/// The most publishes without an answer, if the server allows as many.
const IN_FLIGHT_MAX: u16 = 1_000;
/// The size in bytes of a packet's number, which is not assigned yet when its size is counted.
const PACKET_ID_BYTES: usize = 2;

/// Publishes events to topics of an MQTT 5 server.
///
/// Cancel-safety: a dropped call ends the connection. Events on their way to the server may arrive.
pub struct MqttSink {
    server: Server,
    table: MqttSinkTable,
    /// The longest time of a call.
    timeout: Duration,
    concurrency: usize,
    /// The connection of all calls.
    shared: Mutex<Option<Arc<Session>>>,
    connecting: AsyncMutex<()>,
}

/// A connection.
struct Session {
    client: AsyncClient,
    waiting: Arc<Mutex<Waiting>>,
    packet_bytes_max: usize,
    driver: AbortOnDropHandle<()>,
}

/// The publishes that wait for an answer.
#[derive(Default)]
struct Waiting {
    /// Publishes that the client has not numbered yet, in its order.
    queued: VecDeque<oneshot::Sender<PubAckReason>>,
    /// Publishes by the number of their packet.
    sent: HashMap<u16, oneshot::Sender<PubAckReason>>,
    /// Why the connection has ended.
    ended: Option<Down>,
}

impl Waiting {
    fn end(&mut self, why: Down) {
        self.ended.get_or_insert(why);
        self.queued.clear();
        self.sent.clear();
    }
}

/// Ends the connection for those who wait on it, even if its task panics: nobody would connect
/// again.
struct EndOnDrop(Arc<Mutex<Waiting>>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        lock(&self.0).end(classify::broken_off());
    }
}

/// Passes answers to the waiting publishes, until the connection ends.
async fn drive(mut events: EventLoop, driving: EndOnDrop) {
    loop {
        let event = events.poll().await;
        let mut waiting = lock(&driving.0);
        match event {
            Ok(Event::Outgoing(Outgoing::Publish(number))) => {
                if let Some(next) = waiting.queued.pop_front() {
                    waiting.sent.insert(number, next);
                }
            }
            Ok(Event::Incoming(Packet::PubAck(ack))) => {
                if let Some(waits) = waiting.sent.remove(&ack.pkid) {
                    let _ = waits.send(ack.reason);
                }
            }
            Ok(_) => {}
            Err(error) => return waiting.end(classify::lost(&error)),
        }
    }
}

impl Session {
    async fn open(server: &Server, message_max: usize, room: usize) -> Result<Self, Down> {
        let connected = server.connect(room, |options| _ = options.set_outgoing_inflight_upper_limit(IN_FLIGHT_MAX));
        let (client, events, answer) = connected.await?;
        let limits = answer.properties.as_ref();
        if limits.is_some_and(|limits| limits.max_qos == Some(0)) {
            let text = format!("{} takes QoS 0 only, which it does not confirm", server.url);
            return Err(classify::mismatch("mqtt_refused", text));
        }
        let server_max = limits.and_then(|limits| limits.max_packet_size).map_or(usize::MAX, |bytes| bytes as usize);
        let waiting = Arc::default();
        let driver = AbortOnDropHandle::new(tokio::spawn(drive(events, EndOnDrop(Arc::clone(&waiting)))));
        Ok(Self { client, waiting, packet_bytes_max: message_max.min(server_max), driver })
    }

    fn ended(&self) -> Option<Down> {
        lock(&self.waiting).ended.clone()
    }
}

/// A call in progress. Unless all of it was answered, it ends the connection: what the client still
/// has must not be sent after later events.
struct Call {
    session: Arc<Session>,
    is_over: bool,
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.is_over {
            // First, so that the end of its task is not taken for the reason.
            lock(&self.session.waiting).end(classify::given_up());
            self.session.driver.abort();
        }
    }
}

impl MqttSink {
    /// Returns a sink that connects when the first event is sent.
    pub(crate) fn new(table: &MqttSinkTable, timeout: Duration, concurrency: Option<usize>) -> Self {
        let (server, table, concurrency) = (table.server(), table.clone(), concurrency.unwrap_or(CONCURRENCY));
        Self { server, table, timeout, concurrency, shared: Mutex::default(), connecting: AsyncMutex::default() }
    }

    /// Returns the connection that all calls share, and makes one if there is none.
    async fn session(&self) -> Result<Arc<Session>, Down> {
        let _connecting = self.connecting.lock().await;
        let known = lock(&self.shared).clone();
        if let Some(session) = known.filter(|session| session.ended().is_none()) {
            return Ok(session);
        }
        let room = BATCH_MAX * self.concurrency;
        let session = Arc::new(Session::open(&self.server, self.table.message_max, room).await?);
        *lock(&self.shared) = Some(Arc::clone(&session));
        Ok(session)
    }

    /// Hands an event to the client. Returns the receiver of its answer, or why it was not handed
    /// over.
    fn publish(&self, session: &Session, delivery: &Delivery) -> Result<oneshot::Receiver<PubAckReason>, Outcome> {
        let topic = topic::RULES.name(&self.table.topic, &delivery.event)?;
        let wrapped = self.table.envelope.wrap(&delivery.event, &self.table.source)?;
        let properties = message::properties(delivery, &wrapped)?;
        let publish = Publish::new(topic.as_str(), QoS::AtLeastOnce, wrapped.body.clone(), Some(properties));
        let (bytes, most) = (publish.size() + PACKET_ID_BYTES, session.packet_bytes_max);
        if bytes > most {
            let text = format!("the packet has {bytes} bytes; the sink's message_max and the server allow {most}");
            return Err(Outcome::dead("payload_too_large", text));
        }
        let (heard, hears) = oneshot::channel();
        // Locked until the client has the publish, so that both have the same order.
        let mut waiting = lock(&session.waiting);
        if let Some(down) = &waiting.ended {
            return Err(down.clone().outcome());
        }
        let (body, properties) = (publish.payload, publish.properties.unwrap_or_default());
        let handed = session.client.try_publish_with_properties(topic, QoS::AtLeastOnce, false, body, properties);
        match handed {
            Ok(()) => waiting.queued.push_back(heard),
            // The server is well: several stores share this client, each with calls of its own.
            Err(_) => {
                let error = "the client's queue is full; other stores send, too".into();
                return Err(Outcome::Throttled { code: "mqtt_busy".into(), error, after: None });
            }
        }
        Ok(hears)
    }
}

#[async_trait]
impl Sink for MqttSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: BATCH_MAX, concurrency: self.concurrency, prefix: false, system: Some("mqtt") }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        if deliveries.is_empty() {
            return Vec::new();
        }
        let deadline = Instant::now() + self.timeout;
        let connected = timeout_at(deadline, self.session()).await;
        let session = match connected.unwrap_or_else(|_| Err(classify::no_answer(&self.server.url))) {
            Ok(session) => session,
            Err(down) => return vec![down.outcome(); deliveries.len()],
        };
        let mut call = Call { session, is_over: false };
        let sent: Vec<_> = deliveries.iter().map(|delivery| self.publish(&call.session, delivery)).collect();
        let (mut outcomes, mut is_silent) = (Vec::with_capacity(sent.len()), false);
        for sent in sent {
            outcomes.push(match sent {
                Err(outcome) => outcome,
                Ok(hears) => match timeout_at(deadline, hears).await {
                    Ok(Ok(reason)) => classify::answer(reason, self.table.mandatory),
                    Ok(Err(_)) => call.session.ended().unwrap_or_else(classify::given_up).ambiguous(),
                    Err(_) => {
                        is_silent = true;
                        classify::no_ack()
                    }
                },
            });
        }
        call.is_over = !is_silent;
        outcomes
    }

    /// Everything was answered by then, so nothing is lost.
    async fn close(&self) {
        lock(&self.shared).take();
    }
}
