//! The source: a subscription with a session that the server keeps.
//!
//! A separate task reads, whether or not anyone waits for messages: the server must see that we are
//! alive.

mod held;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{AckToken, Clock, Down, ErrorKind, Result, Source, SourceCapabilities, SourceMessage, lock};
use rumqttc::Outgoing;
use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{Filter, Packet, Publish, RetainForwardRule};
use rumqttc::v5::{AsyncClient, Event};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use self::held::Held;
use crate::classify;
use crate::config::MqttSourceTable;
use crate::connection::Server;
use crate::message::raw_message;

/// The longest wait until a settlement is written to the connection.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(10);
/// What the client may have to send besides PUBACKs: the subscription.
const ROOM: usize = 1;
/// The shortest time between two warnings of a lost session: a server that keeps none loses it at
/// each connection.
const LOST_QUIET: Duration = Duration::from_secs(60);

/// Reads topics of an MQTT 5 server with QoS 1.
///
/// A message is acknowledged once it is stored. So after a lost connection, a restart or a crash,
/// unstored messages are delivered again, as long as the server keeps our session.
pub struct MqttSource {
    reader: Arc<Reader>,
}

struct Reader {
    server: Server,
    table: MqttSourceTable,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    /// Signals that there is a message to hand out, or a failure to report.
    changed: Notify,
    /// Signals that a caller waits for messages.
    wanted: Notify,
    /// Whether the task that reads runs.
    reading: AtomicBool,
    closed: CancellationToken,
}

/// Lets the next call start another task if this one ends, even by a panic: nothing would be read
/// any more.
struct EndOnDrop(Arc<Reader>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        // First, so that the call after the one that reports this starts another.
        self.0.reading.store(false, Ordering::Release);
        self.0.end(classify::broken_off());
    }
}

#[derive(Default)]
struct State {
    held: Held,
    connection: Option<Connection>,
    failure: Option<Down>,
    /// Whether it was connected before, so that the server should have a session.
    was_connected: bool,
    /// When the log last said that the session was lost.
    lost_said_at: Option<Duration>,
    /// The session expiry that the server granted, in seconds, if it is less than ours.
    expiry_short: Option<u32>,
    /// Whether messages of QoS 0 are dropped, because too many are held.
    is_dropping: bool,
}

struct Connection {
    client: AsyncClient,
    /// How many PUBACKs the client was given, and how many it has written.
    asked: u64,
    written: watch::Receiver<u64>,
}

impl Reader {
    /// Reads until the source is closed. Reconnects when a caller waits for messages.
    async fn run(running: EndOnDrop) {
        let reader = &running.0;
        loop {
            let down = tokio::select! {
                biased;
                () = reader.closed.cancelled() => return,
                down = reader.read() => down,
            };
            reader.end(down);
            tokio::select! {
                biased;
                () = reader.closed.cancelled() => return,
                () = reader.wanted.notified() => {}
            }
        }
    }

    /// Forgets the connection, and what came with it.
    fn end(&self, down: Down) {
        {
            let mut state = self.state();
            state.connection = None;
            state.held.forget();
            state.failure = Some(down);
        }
        self.changed.notify_waiters();
    }

    /// Reads until the connection is lost. Returns why.
    async fn read(&self) -> Down {
        let MqttSourceTable { topic, share, session_expiry, in_flight, .. } = &self.table;
        let expiry = u32::try_from(session_expiry.as_secs()).unwrap_or(u32::MAX);
        let connected = self.server.connect(usize::from(*in_flight) + ROOM, |options| {
            options.set_clean_start(false).set_session_expiry_interval(Some(expiry));
            options.set_receive_maximum(Some(*in_flight)).set_manual_acks(true);
            // The source publishes nothing.
            options.set_outgoing_inflight_upper_limit(1);
        });
        let (client, mut events, answer) = match connected.await {
            Ok(connected) => connected,
            Err(down) => return down,
        };
        let path = share.as_ref().map_or_else(|| topic.clone(), |group| format!("$share/{group}/{topic}"));
        let mut filter = Filter::new(path.as_str(), QoS::AtLeastOnce);
        // Retained messages are delivered once, not at each connection.
        filter.retain_forward_rule = RetainForwardRule::OnNewSubscribe;
        if client.try_subscribe_many([filter]).is_err() {
            return classify::mismatch("mqtt_subscribe_refused", format!("{path} is not a valid topic filter"));
        }
        let (writes, written) = watch::channel(0);
        {
            let (mut state, now) = (self.state(), self.clock.monotonic());
            let is_lost = std::mem::replace(&mut state.was_connected, true) && !answer.session_present;
            if is_lost && state.lost_said_at.is_none_or(|at| now.saturating_sub(at) >= LOST_QUIET) {
                state.lost_said_at = Some(now);
                warn!(
                    code = "mqtt_session_lost",
                    client_id = self.server.client_id,
                    "server has forgotten our session; what was published meanwhile is lost"
                );
            }
            // Without an answer, the server grants what we asked for.
            let granted = answer.properties.and_then(|properties| properties.session_expiry_interval);
            let short = granted.filter(|granted| *granted < expiry);
            if std::mem::replace(&mut state.expiry_short, short) != short
                && let Some(granted) = short
            {
                warn!(
                    code = "mqtt_session_expiry_short",
                    client_id = self.server.client_id,
                    granted_seconds = granted,
                    asked_seconds = expiry,
                    "server keeps our session for less than session_expiry, and then loses its messages; raise the \
                     server's limit"
                );
            }
            state.connection = Some(Connection { client, asked: 0, written });
        }
        loop {
            match events.poll().await {
                Ok(Event::Incoming(Packet::Publish(publish))) => self.keep(publish),
                Ok(Event::Incoming(Packet::SubAck(answer))) => {
                    if let Some(down) = classify::subscribing(&path, &answer.return_codes) {
                        return down;
                    }
                }
                Ok(Event::Outgoing(Outgoing::PubAck(_))) => writes.send_modify(|count| *count += 1),
                Ok(_) => {}
                Err(error) => return classify::reading(&self.server.client_id, &error),
            }
        }
    }

    fn keep(&self, publish: Publish) {
        let MqttSourceTable { id_property, content_type, in_flight, .. } = &self.table;
        let number = (publish.qos != QoS::AtMostOnce).then_some(publish.pkid);
        if number.is_none() {
            let mut state = self.state();
            // The server neither holds these back nor repeats them.
            let is_full = state.held.len() >= usize::from(*in_flight);
            if is_full && !std::mem::replace(&mut state.is_dropping, is_full) {
                warn!(
                    code = "mqtt_qos0_dropped", topic = %String::from_utf8_lossy(&publish.topic),
                    "messages of QoS 0 dropped: they come faster than they are stored"
                );
            }
            if is_full {
                return;
            }
            state.is_dropping = false;
        }
        // Without the lock: a large message takes a while.
        let message = raw_message(publish, id_property, content_type);
        self.state().held.keep(number, self.clock.monotonic(), message);
        self.changed.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Hands PUBACKs to the client in the order of the messages, as the protocol requires.
    fn acknowledge(&self, tokens: &[AckToken]) -> Option<(watch::Receiver<u64>, u64)> {
        let mut state = self.state();
        let State { held, connection, .. } = &mut *state;
        tokens.iter().for_each(|token| held.settle(token));
        let settled = held.take_settled();
        let connection = connection.as_mut()?;
        for pkid in settled {
            let publish = Publish { pkid, qos: QoS::AtLeastOnce, ..Publish::default() };
            if connection.client.try_ack(&publish).is_ok() {
                connection.asked += 1;
            }
        }
        Some((connection.written.clone(), connection.asked))
    }
}

impl MqttSource {
    /// Returns a source that connects when it is asked for the first message.
    pub(crate) fn new(table: &MqttSourceTable, clock: Arc<dyn Clock>) -> Self {
        let reader = Reader {
            server: table.server(),
            table: table.clone(),
            clock,
            state: Mutex::default(),
            changed: Notify::new(),
            wanted: Notify::new(),
            reading: AtomicBool::new(false),
            closed: CancellationToken::new(),
        };
        Self { reader: Arc::new(reader) }
    }
}

impl Drop for MqttSource {
    fn drop(&mut self) {
        self.reader.closed.cancel();
    }
}

#[async_trait]
impl Source for MqttSource {
    /// In the server's order, unless a group shares the messages.
    fn capabilities(&self) -> SourceCapabilities {
        let in_flight_max = usize::from(self.reader.table.in_flight);
        SourceCapabilities { in_flight_max, ordered: true, nak_delay: true, dead_letters: false }
    }

    async fn next(&self, max: usize) -> Result<Vec<SourceMessage>> {
        let (reader, in_flight_max) = (&self.reader, usize::from(self.reader.table.in_flight));
        if !reader.reading.swap(true, Ordering::AcqRel) {
            tokio::spawn(Reader::run(EndOnDrop(Arc::clone(reader))));
        }
        loop {
            let mut changed = std::pin::pin!(reader.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            if reader.closed.is_cancelled() {
                return Ok(Vec::new());
            }
            let wait = {
                let (mut state, now) = (reader.state(), reader.clock.monotonic());
                let given = state.held.give(max, in_flight_max, now);
                if !given.is_empty() {
                    return Ok(given);
                }
                if let Some(down) = state.failure.take() {
                    return Err(down.error("receive"));
                }
                // A message that is due and not handed out waits for one that is out.
                state.held.due().map(|due| due.saturating_sub(now)).filter(|wait| !wait.is_zero())
            };
            reader.wanted.notify_one();
            tokio::select! {
                biased;
                () = changed => {}
                () = reader.clock.sleep(wait.unwrap_or_default()), if wait.is_some() => {}
            }
        }
    }

    async fn ack(&self, tokens: &[AckToken]) -> Result<()> {
        let Some((mut written, asked)) = self.reader.acknowledge(tokens) else { return Ok(()) };
        // Wakes calls that waited for one of these to be settled.
        self.reader.changed.notify_waiters();
        let all = written.wait_for(|count| *count >= asked);
        // The tokens end with the connection: what the server has not received is delivered again.
        match timeout(SETTLE_TIMEOUT, all).await {
            Ok(Ok(_) | Err(_)) => Ok(()),
            Err(_) => {
                let text = "the server does not accept the acks; the messages may come again";
                Err(classify::down(ErrorKind::Unavailable, "mqtt_settle_timeout", text).error("settle"))
            }
        }
    }

    /// Keeps the message here until its time. If we stop before, it is delivered at the next start.
    async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()> {
        let due = self.reader.clock.monotonic() + delay;
        {
            let mut state = self.reader.state();
            tokens.iter().for_each(|token| state.held.put_back(token, due));
        }
        self.reader.changed.notify_waiters();
        Ok(())
    }

    /// MQTT keeps no dead letters.
    async fn reject(&self, tokens: &[AckToken]) -> Result<()> {
        self.ack(tokens).await
    }

    /// Ends the connection. What is unsettled waits in the session.
    async fn close(&self) {
        self.reader.closed.cancel();
        self.reader.state().connection = None;
        self.reader.changed.notify_waiters();
    }
}
