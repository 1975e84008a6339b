//! A server, a separate client, and a gateway that sees every publish and can inject faults.
#![allow(dead_code)]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, BytesMut};
use postbox_config::SinkContext;
use postbox_core::{Sink, Source};
use postbox_mqtt::{MqttSinkTable, MqttSourceTable};
use postbox_testkit::conformance::Attempt;
use postbox_testkit::sending::PATIENCE;
use postbox_testkit::servers::{PrivateMqtt, listen_anywhere};
use postbox_testkit::{receiving, sending};
use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{Packet, PubAckReason, Publish, PublishProperties};
use rumqttc::v5::{AsyncClient, Event, MqttOptions};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

/// Longest wait for PUBACKs in tests with a silent server.
pub(crate) const SHORT: Duration = Duration::from_secs(1);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics while holding it")
}

/// Starts a server that drops no message because too many are queued.
pub(crate) async fn server() -> PrivateMqtt {
    PrivateMqtt::launch_with("allow_anonymous true\nmax_queued_messages 0\n").await
}

/// Builds a sink from the address and these keys.
pub(crate) async fn sink(url: &str, keys: &str) -> Arc<dyn Sink> {
    sink_with(url, keys, &sending::context(PATIENCE / 2)).await
}

pub(crate) async fn sink_with(url: &str, keys: &str, context: &SinkContext) -> Arc<dyn Sink> {
    sending::sink::<MqttSinkTable>(&format!("url = {url:?}\n{keys}"), context).await
}

pub(crate) fn table(url: &str, keys: &str) -> MqttSourceTable {
    sending::table(&format!("url = {url:?}\n{keys}"))
}

/// Builds a source from the address and these keys.
pub(crate) async fn source(url: &str, keys: &str) -> Arc<dyn Source> {
    receiving::source::<MqttSourceTable>(&format!("url = {url:?}\n{keys}")).await
}

/// A separate client of the test, with the messages that it received.
pub(crate) struct Peer {
    client: AsyncClient,
    acks: mpsc::UnboundedReceiver<PubAckReason>,
    heard: mpsc::UnboundedReceiver<Publish>,
    subscribed: mpsc::UnboundedReceiver<()>,
    _driver: AbortOnDropHandle<()>,
}

impl Peer {
    /// Connects without a session.
    pub(crate) async fn connect(url: &str) -> Self {
        Self::connect_as(url, "", |_| ()).await
    }

    pub(crate) async fn connect_as(url: &str, id: &str, change: impl FnOnce(&mut MqttOptions)) -> Self {
        let address: SocketAddr = url.trim_start_matches("mqtt://").parse().expect("an address");
        let mut options = MqttOptions::new(id, address.ip().to_string(), address.port());
        options.set_max_packet_size(Some(268_435_455));
        change(&mut options);
        let (client, mut events) = AsyncClient::new(options, 10_000);
        let (ack, acks) = mpsc::unbounded_channel();
        let (hear, heard) = mpsc::unbounded_channel();
        let (subscribe, subscribed) = mpsc::unbounded_channel();
        assert!(matches!(events.poll().await, Ok(Event::Incoming(Packet::ConnAck(_)))), "it answers");
        let driver = tokio::spawn(async move {
            while let Ok(event) = events.poll().await {
                let _ = match event {
                    Event::Incoming(Packet::PubAck(it)) => ack.send(it.reason).is_ok(),
                    Event::Incoming(Packet::Publish(it)) => hear.send(it).is_ok(),
                    Event::Incoming(Packet::SubAck(_)) => subscribe.send(()).is_ok(),
                    _ => true,
                };
            }
        });
        Self { client, acks, heard, subscribed, _driver: AbortOnDropHandle::new(driver) }
    }

    pub(crate) async fn subscribe(&mut self, filter: &str) {
        self.client.subscribe(filter, QoS::AtLeastOnce).await.expect("asked");
        timeout(PATIENCE, self.subscribed.recv()).await.expect("in time").expect("an answer");
    }

    /// Publishes as any client does. Returns the server's answer.
    pub(crate) async fn publish(&mut self, topic: &str, properties: &[(&str, &str)], payload: &[u8]) -> PubAckReason {
        let pairs = properties.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let properties = PublishProperties { user_properties: pairs.collect(), ..Default::default() };
        self.publish_with(topic, properties, payload).await
    }

    pub(crate) async fn publish_with(
        &mut self,
        topic: &str,
        properties: PublishProperties,
        payload: &[u8],
    ) -> PubAckReason {
        let (qos, payload) = (QoS::AtLeastOnce, payload.to_vec());
        self.client.publish_with_properties(topic, qos, false, payload, properties).await.expect("asked");
        timeout(PATIENCE, self.acks.recv()).await.expect("in time").expect("an answer")
    }

    pub(crate) async fn publish_qos0(&mut self, topic: &str, retain: bool, payload: &[u8]) {
        self.client.publish(topic, QoS::AtMostOnce, retain, payload.to_vec()).await.expect("asked");
    }

    /// Returns the next message.
    pub(crate) async fn next(&mut self) -> Publish {
        timeout(PATIENCE, self.heard.recv()).await.expect("in time").expect("the connection stands")
    }

    /// Returns the messages received so far: a publish on the same connection arrives after
    /// everything before it. The client must be subscribed to `fence`.
    pub(crate) async fn drain(&mut self) -> Vec<Publish> {
        self.publish("fence", &[], b"").await;
        let mut all = Vec::new();
        loop {
            match self.next().await {
                fence if fence.topic == "fence" => return all,
                message => all.push(message),
            }
        }
    }
}

/// Returns a user property of a message.
pub(crate) fn property(publish: &Publish, name: &str) -> Option<String> {
    let properties = publish.properties.as_ref()?;
    properties.user_properties.iter().find(|(its, _)| its == name).map(|(_, value)| value.clone())
}

/// What a gateway does with publishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The server receives them and answers.
    Pass,
    /// The gateway answers with this reason.
    Say(u8),
    /// The server receives them, but the client gets nothing any more.
    Lose,
    /// The gateway drops them without an answer.
    Hang,
}

/// Stands in front of a server, at a fixed address.
pub(crate) struct Gateway {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: Mutex<Option<AbortOnDropHandle<()>>>,
}

struct Shared {
    upstream: String,
    mode: Mutex<Mode>,
    attempts: Mutex<Vec<Attempt>>,
    connections: watch::Sender<usize>,
    /// Number of subscribe requests.
    subscriptions: watch::Sender<usize>,
    /// Number of connections that ended by themselves or were cut.
    ended: watch::Sender<usize>,
    /// Increases when all connections are to end.
    cuts: watch::Sender<usize>,
}

impl Gateway {
    pub(crate) async fn in_front_of(url: &str) -> Self {
        let listener = TcpListener::from_std(listen_anywhere().expect("a port")).expect("listening");
        let shared = Arc::new(Shared {
            upstream: url.trim_start_matches("mqtt://").to_owned(),
            mode: Mutex::new(Mode::Pass),
            attempts: Mutex::default(),
            connections: watch::Sender::new(0),
            subscriptions: watch::Sender::new(0),
            ended: watch::Sender::new(0),
            cuts: watch::Sender::new(0),
        });
        let address = listener.local_addr().expect("an address");
        let task = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&shared).serve(listener)));
        Self { address, shared, task: Mutex::new(Some(task)) }
    }

    pub(crate) fn url(&self) -> String {
        format!("mqtt://{}", self.address)
    }

    pub(crate) fn set(&self, mode: Mode) {
        *lock(&self.shared.mode) = mode;
    }

    /// Returns the messages that arrived, accepted or not.
    pub(crate) fn attempts(&self) -> Vec<Attempt> {
        lock(&self.shared.attempts).clone()
    }

    pub(crate) fn connections(&self) -> usize {
        *self.shared.connections.borrow()
    }

    /// Waits until there were `times` subscribe requests.
    pub(crate) async fn subscriptions(&self, times: usize) {
        let subscribed =
            async { self.shared.subscriptions.subscribe().wait_for(|count| *count >= times).await.map(drop) };
        timeout(PATIENCE, subscribed).await.expect("in time").expect("the gateway lives");
    }

    /// Ends all connections. What a client has sent so far still reaches the server.
    pub(crate) async fn cut(&self) {
        // A client may connect again at once.
        let all = *self.shared.ended.borrow() + self.connections();
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
        let ended = async { self.shared.ended.subscribe().wait_for(|count| *count >= all).await.map(drop) };
        timeout(PATIENCE, ended).await.expect("in time").expect("the gateway lives");
    }

    /// Stops listening, and closes every connection.
    pub(crate) async fn stop(&self) {
        let task = lock(&self.task).take();
        drop(task);
        while TcpStream::connect(self.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
        self.shared.connections.send_replace(0);
    }

    pub(crate) async fn start(&self) {
        if lock(&self.task).is_none() {
            let listener = TcpListener::bind(self.address).await.expect("our own port");
            *lock(&self.task) = Some(AbortOnDropHandle::new(tokio::spawn(Arc::clone(&self.shared).serve(listener))));
        }
    }
}

impl Shared {
    async fn serve(self: Arc<Self>, listener: TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            let Ok((client, _)) = listener.accept().await else { return };
            let shared = Arc::clone(&self);
            self.connections.send_modify(|count| *count += 1);
            connections.spawn(async move {
                let _ = shared.connection(client).await;
                shared.connections.send_modify(|count| *count = count.saturating_sub(1));
                shared.ended.send_modify(|count| *count += 1);
            });
        }
    }

    async fn connection(&self, mut client: TcpStream) -> std::io::Result<()> {
        let mut cuts = self.cuts.subscribe();
        let mut server = TcpStream::connect(&self.upstream).await?;
        let (mut up, mut down) = (BytesMut::new(), BytesMut::new());
        let mut is_mute = false;
        loop {
            tokio::select! {
                read = client.read_buf(&mut up) => {
                    if read? == 0 {
                        return Ok(());
                    }
                    self.pass_up(&mut up, &mut client, &mut server, &mut is_mute).await?;
                }
                read = server.read_buf(&mut down) => {
                    if read? == 0 {
                        return Ok(());
                    }
                    if !is_mute {
                        client.write_all(&down).await?;
                    }
                    down.clear();
                }
                _ = cuts.changed() => break,
            }
        }
        // Reads what has arrived, whether the runtime has noticed it or not.
        let mut client = client.into_std()?;
        let mut rest = Vec::new();
        let _ = std::io::Read::read_to_end(&mut client, &mut rest);
        up.extend_from_slice(&rest);
        server.write_all(&up).await?;
        server.shutdown().await?;
        while server.read_buf(&mut down).await? > 0 {}
        Ok(())
    }

    async fn pass_up(
        &self,
        up: &mut BytesMut,
        client: &mut TcpStream,
        server: &mut TcpStream,
        is_mute: &mut bool,
    ) -> std::io::Result<()> {
        while let Some(bytes) = packet_bytes(up) {
            let packet = up.split_to(bytes);
            if packet[0] >> 4 != 3 {
                server.write_all(&packet).await?;
                self.subscriptions.send_modify(|count| *count += usize::from(packet[0] >> 4 == 8));
                continue;
            }
            let mode = *lock(&self.mode);
            let Ok(Packet::Publish(publish)) = Packet::read(&mut packet.clone(), None) else { panic!("a publish") };
            lock(&self.attempts).push(Attempt {
                dedupe_id: property(&publish, "postbox-id"),
                payload: publish.payload.to_vec(),
                accepted: matches!(mode, Mode::Pass | Mode::Lose),
            });
            *is_mute |= mode == Mode::Lose;
            match mode {
                Mode::Pass | Mode::Lose => server.write_all(&packet).await?,
                Mode::Hang => {}
                Mode::Say(reason) => {
                    let mut answer = BytesMut::from(&b"\x40\x04"[..]);
                    answer.put_u16(publish.pkid);
                    answer.put_u8(reason);
                    answer.put_u8(0);
                    client.write_all(&answer).await?;
                }
            }
        }
        Ok(())
    }
}

/// Starts a server that answers each CONNECT and each SUBSCRIBE with these bytes, and nothing else.
/// Returns its address, and what ends it.
pub(crate) fn scripted(connack: &'static [u8], suback: &'static [u8]) -> (String, AbortOnDropHandle<()>) {
    let listener = TcpListener::from_std(listen_anywhere().expect("a port")).expect("listening");
    let url = format!("mqtt://{}", listener.local_addr().expect("an address"));
    let task = tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((mut client, _)) = listener.accept().await {
            connections.spawn(async move {
                let mut read = BytesMut::new();
                while client.read_buf(&mut read).await.is_ok_and(|bytes| bytes > 0) {
                    while let Some(bytes) = packet_bytes(&read) {
                        let answer = match read.split_to(bytes)[0] >> 4 {
                            1 => connack,
                            8 => suback,
                            _ => continue,
                        };
                        client.write_all(answer).await.expect("written");
                    }
                }
            });
        }
    });
    (url, AbortOnDropHandle::new(task))
}

/// Returns the length of the first packet, in bytes, if all of it is there.
fn packet_bytes(buffer: &BytesMut) -> Option<usize> {
    let mut rest = &buffer[..];
    rest.has_remaining().then(|| rest.advance(1))?;
    let (mut length, mut shift) = (0_usize, 0);
    loop {
        let byte = rest.has_remaining().then(|| rest.get_u8())?;
        length |= usize::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            break;
        }
    }
    let whole = buffer.len() - rest.len() + length;
    (buffer.len() >= whole).then_some(whole)
}
