//! The service as a whole, on the memory store: start, deliver, report, stop.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use async_trait::async_trait;
use postbox_config::{SourceConfig, SourceContext};
use postbox_core::{
    Append as _, Count, Error, ErrorKind, Inspect as _, LogName, Migrate as _, NewEvent, RawMessage, Source, Store,
};
use postbox_engine::TokioClock;
use postbox_memory::{Call, MemorySource, MemoryStore, Wire};
use postbox_server::status::{ServiceStatus, StatsJson, add_marks, fetch};
use postbox_server::{Config, NamedSource, ServerConfig, Service};
use postbox_webhook::UnixSeconds;
use postbox_webhook::standard::{SignKey, Signer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// The secret of the published Standard Webhooks vectors.
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
/// Only turns a hang into a failure: nothing here takes long.
const DEADLINE: Duration = Duration::from_secs(120);

fn memory() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new(Arc::new(TokioClock::new())))
}

async fn start(text: &str, store: &Arc<MemoryStore>) -> Result<Service> {
    Ok(Service::start_on(config(text)?, Arc::clone(store) as Arc<dyn Store>).await?)
}

fn config(text: &str) -> Result<Config> {
    Ok(Config::parse(&format!("{text}\n[server]\nlisten = \"127.0.0.1:0\"\nstop_timeout = \"60s\"\n"))?)
}

async fn stop(service: Service) -> Result<()> {
    service.stop();
    service.stop();
    Ok(timeout(DEADLINE, service.wait()).await??)
}

/// One HTTP exchange: status and body.
async fn exchange(address: SocketAddr, head: &str, body: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(address).await?;
    let request =
        format!("{head}\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    timeout(DEADLINE, stream.read_to_string(&mut answer)).await??;
    let status = answer.split(' ').nth(1).context("no status")?.parse()?;
    let body = answer.split_once("\r\n\r\n").context("no body")?.1.to_owned();
    Ok((status, body))
}

async fn get(address: SocketAddr, path: &str) -> Result<(u16, String)> {
    exchange(address, &format!("GET {path} HTTP/1.1"), "").await
}

/// Asks again until the answer is the wanted one.
async fn until(what: &str, mut wanted: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let asking = async {
        while !wanted().await? {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok::<_, anyhow::Error>(())
    };
    timeout(DEADLINE, asking).await.with_context(|| format!("never: {what}"))?
}

fn file_subscription(path: &std::path::Path) -> String {
    format!("[subscriptions.out]\nsink = {{ type = \"file\", path = {:?} }}\n", path.display().to_string())
}

#[tokio::test]
async fn it_delivers_and_says_so() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("events.jsonl");
    let store = memory();
    let service = start(&file_subscription(&path), &store).await?;
    let events: Vec<NewEvent> =
        (0..10).map(|n| NewEvent::json("order.paid", format!("{{\"n\":{n}}}")).key(n.to_string())).collect();
    store.append(&LogName::outbox(), &events).await?;

    until("ten lines", async || Ok(std::fs::read_to_string(&path).unwrap_or_default().lines().count() == 10)).await?;
    ensure!(get(service.address(), "/healthz").await? == (200, "ok\n".into()));
    ensure!(get(service.address(), "/readyz").await? == (200, "ready\n".into()));
    ensure!(get(service.address(), "/nowhere").await?.0 == 404);
    let status = asked(&service).await?;
    ensure!(status.ready && status.faults.is_empty() && status.address == service.address(), "{status:?}");
    ensure!(status.of_another(None, store.validate().await?).is_none(), "{status:?}");
    ensure!(status.of_another(None, jiff::Timestamp::UNIX_EPOCH).is_some(), "{status:?}");
    until("counted", async || {
        let (status, page) = get(service.address(), "/metrics").await?;
        ensure!(status == 200);
        check_page(&page)?;
        Ok(page.contains("postbox_delivered_total{subscription=\"out\"} 10\n"))
    })
    .await?;
    stop(service).await
}

/// The rules of OpenMetrics: samples follow their family, no series occurs twice, and the end is
/// marked.
fn check_page(page: &str) -> Result<()> {
    let mut names: Vec<String> = Vec::new();
    let (mut families, mut seen) = (std::collections::HashSet::new(), std::collections::HashSet::new());
    for line in page.strip_suffix("# EOF\n").context("no end")?.lines() {
        if let Some(named) = line.strip_prefix("# TYPE ") {
            let (name, kind) = named.split_once(' ').context("no kind")?;
            ensure!(families.insert(name.to_owned()), "{name} twice");
            let suffixes: &[&str] = match kind {
                "counter" => &["_total"],
                "histogram" => &["_bucket", "_sum", "_count"],
                _ => &[""],
            };
            names = suffixes.iter().map(|suffix| format!("{name}{suffix}")).collect();
        } else if !line.starts_with('#') {
            let (series, value) = line.rsplit_once(' ').context("no value")?;
            let name = series.split('{').next().unwrap_or_default();
            ensure!(names.iter().any(|known| known == name), "{series} under {names:?}");
            ensure!(seen.insert(series), "{series} twice");
            value.parse::<f64>().with_context(|| format!("{line}: no number"))?;
        }
    }
    ensure!(seen.len() > 20, "hardly anything is measured:\n{page}");
    Ok(())
}

#[tokio::test]
async fn a_dead_destination_makes_it_unready_and_healthy() -> Result<()> {
    // A port that is bound by this test and has no listener.
    let nobody = TcpSocket::new_v4()?;
    nobody.bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    let target = nobody.local_addr()?;
    let store = memory();
    let text = format!(
        "[subscriptions.out]\nsink = {{ type = \"http\", url = \"http://{target}/\", allow = [\"127.0.0.1\"], secret = \"{SECRET}\" }}\n"
    );
    let service = start(&text, &store).await?;
    store.append(&LogName::outbox(), &[NewEvent::json("order.paid", "{}")]).await?;
    until("unready", async || {
        let (status, body) = get(service.address(), "/readyz").await?;
        Ok(status == 503 && body.contains("out: ") && body.contains("breaker"))
    })
    .await?;
    ensure!(get(service.address(), "/healthz").await?.0 == 200);
    let status = asked(&service).await?;
    let [fault] = &status.faults[..] else { anyhow::bail!("{status:?}") };
    ensure!(fault.subscription == Some("out".parse()?) && fault.code == "connect_refused", "{fault:?}");
    ensure!(!status.ready && fault.what.contains("the breaker has been open since"), "{fault:?}");
    let (_, page) = get(service.address(), "/metrics").await?;
    ensure!(page.contains("postbox_breaker_opened_total{subscription=\"out\"} "), "{page}");
    stop(service).await
}

/// The service's status, fetched as `doctor` does.
async fn asked(service: &Service) -> Result<ServiceStatus> {
    let config = ServerConfig { listen: service.address(), ..ServerConfig::default() };
    fetch(&config).await.ok().flatten().context("no status")
}

#[tokio::test]
async fn only_a_service_of_ours_has_a_status() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let config = ServerConfig { listen: listener.local_addr()?, ..ServerConfig::default() };
    let answers = [
        "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nready\n",
        "HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n",
        "SSH-2.0-x\r\n",
    ];
    for answer in answers {
        let other = async {
            let (mut stream, _) = listener.accept().await?;
            stream.write_all(answer.as_bytes()).await?;
            // Until the peer closes.
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
            anyhow::Ok(())
        };
        let (status, served) = tokio::join!(fetch(&config), other);
        served?;
        ensure!(status == Ok(None), "{answer:?} gave {status:?}");
    }
    drop(listener);
    ensure!(fetch(&config).await == Ok(None), "nobody listens");
    Ok(())
}

#[tokio::test]
async fn each_store_of_a_subscription_has_its_high_water_marks() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let config = ServerConfig { listen: listener.local_addr()?, ..ServerConfig::default() };
    let service = async {
        let (mut stream, _) = listener.accept().await?;
        ensure!(stream.read(&mut [0; 1024]).await? > 0, "no request");
        let marks = r#"[{"subscription":"out","high_water_marks":[{"stream":"s","position":"7"}],"fault":null}]"#;
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", marks.len());
        stream.write_all((head + marks).as_bytes()).await?;
        anyhow::Ok(())
    };
    let mut counted = Vec::new();
    for name in ["out", "other", "out"] {
        let unread = StatsJson::unread(LogName::outbox(), Count::default());
        counted.push(StatsJson { subscription: Some(name.parse()?), ..unread });
    }
    let ((), served) = tokio::join!(add_marks(&config, &mut counted), service);
    served?;
    let marks: Vec<usize> = counted.iter().map(|stats| stats.high_water_marks.len()).collect();
    ensure!(marks == [1, 0, 1], "{marks:?}");
    Ok(())
}

/// As one that was stopped: the kernel still accepts connections for it.
#[tokio::test(start_paused = true)]
async fn a_service_that_does_not_answer_is_a_finding() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let config = ServerConfig { listen: listener.local_addr()?, ..ServerConfig::default() };
    let silent = fetch(&config).await.expect_err("nobody answers");
    ensure!(silent.code == "service_silent", "{silent:?}");
    Ok(())
}

fn webhook(name: &str) -> String {
    format!("[sources.{name}]\ntype = \"webhook\"\nscheme = \"standard-webhooks\"\nsecrets = [\"{SECRET}\"]\n")
}

/// The head of a genuine request to a source.
fn signed(source: &str, id: &str, body: &str) -> Result<String> {
    let now = UnixSeconds(jiff::Timestamp::now().as_second());
    let signed = Signer::new([SignKey::parse(SECRET)?])?.sign(id, now, body.as_bytes())?;
    let mut head = format!("POST /in/{source} HTTP/1.1");
    for (name, value) in signed.headers() {
        head += &format!("\r\n{name}: {value}");
    }
    Ok(head)
}

#[tokio::test]
async fn verified_webhooks_are_stored_once() -> Result<()> {
    let text = "[subscriptions.apply]\nlog = \"inbox\"\n[subscriptions.out]\n".to_owned() + &webhook("partner");
    let store = memory();
    let service = start(&text, &store).await?;
    let body = r#"{"type":"invoice.paid","id":7}"#;
    let head = signed("partner", "msg_1", body)?;
    ensure!(exchange(service.address(), &head, body).await?.0 == 202);
    ensure!(exchange(service.address(), &head, body).await?.0 == 200);
    ensure!(exchange(service.address(), "POST /in/partner HTTP/1.1", body).await?.0 == 401);
    ensure!(store.stats(&"apply".parse()?).await?.pending == 1);
    let (_, page) = get(service.address(), "/metrics").await?;
    for line in [
        "postbox_received_total{source=\"partner\",result=\"accepted\"} 1\n",
        "postbox_received_total{source=\"partner\",result=\"store_unavailable\"} 0\n",
        "postbox_duplicates_total{layer=\"timestamp\",source=\"partner\"} 0\n",
        "postbox_duplicates_total{layer=\"inbox\",source=\"partner\"} 1\n",
        "postbox_duplicates_total{layer=\"destination\",source=\"partner\",subscription=\"apply\"} 0\n",
        "postbox_duplicates_total{layer=\"destination\",source=\"none\",subscription=\"out\"} 0\n",
        "postbox_headers_dropped_total{source=\"partner\"} 0\n",
    ] {
        ensure!(page.contains(line), "{line} is not in\n{page}");
    }
    check_page(&page)?;
    stop(service).await
}

#[tokio::test]
async fn events_of_a_log_that_nobody_reads_are_counted_as_unrouted() -> Result<()> {
    let store = memory();
    for log in ["inbox", "outbox"] {
        store.append(&log.parse()?, &[NewEvent::json("order.paid", "{}")]).await?;
    }
    let service = start("[subscriptions.out]\n", &store).await?;
    until("the inbox and no other", async || {
        let (_, page) = get(service.address(), "/metrics").await?;
        Ok(page.contains("postbox_unrouted_events{log=\"inbox\",topic=\"other\"} 1\n")
            && !page.contains("postbox_unrouted_events{log=\"outbox\""))
    })
    .await?;
    stop(service).await
}

#[tokio::test]
async fn a_source_whose_log_does_not_exist_ends_the_start() -> Result<()> {
    let text = webhook("partner") + "log = \"nowhere\"\n";
    let refused = Service::start_on(config(&text)?, memory()).await.err().context("it started")?;
    ensure!(refused.code() == "log_unknown", "{refused}");
    ensure!(refused.message().contains("postbox migrate up --log nowhere"), "{refused}");
    Ok(())
}

/// Does not execute one operation until it may.
struct Shut(&'static str, CancellationToken);

#[async_trait]
impl Wire for Shut {
    async fn carry(&self, call: Arc<Call>) -> postbox_core::Result<()> {
        if call.operation == self.0 {
            self.1.cancelled().await;
        }
        call.execute();
        Ok(())
    }
}

#[tokio::test]
async fn one_source_may_use_all_that_the_connections_leave_and_no_more() -> Result<()> {
    let open = CancellationToken::new();
    let store = memory().client(Some(Arc::new(Shut("receive", open.clone()))));
    let mut config = config(&["a", "b", "c"].map(webhook).concat())?;
    config.server.connections = 4;
    let service = Service::start_on(config, Arc::new(store)).await?;
    let mut posts = JoinSet::new();
    for id in ["1", "2", "3"] {
        let (address, head) = (service.address(), signed("a", id, "{}")?);
        posts.spawn(async move { exchange(address, &head, "{}").await });
    }
    // Half of the connections: two messages wait for the store, and the third is refused at once.
    ensure!(posts.join_next().await.context("three were sent")???.0 == 503);
    open.cancel();
    while let Some(answer) = posts.join_next().await {
        ensure!(answer??.0 == 202);
    }
    stop(service).await
}

#[tokio::test]
async fn a_store_that_is_slow_to_be_taken_up_keeps_no_probe_waiting() -> Result<()> {
    let (folder, open) = (tempfile::tempdir()?, CancellationToken::new());
    let store = memory().client(Some(Arc::new(Shut("subscribe", open.clone()))));
    let config = config(&file_subscription(&folder.path().join("events.jsonl")))?;
    let service = timeout(DEADLINE, Service::start_on(config, Arc::new(store))).await??;
    ensure!(get(service.address(), "/healthz").await? == (200, "ok\n".into()));
    let (status, reasons) = get(service.address(), "/readyz").await?;
    ensure!(status == 503 && reasons.contains("the store is still being taken up"), "{reasons}");
    open.cancel();
    until("ready", async || Ok(get(service.address(), "/readyz").await?.0 == 200)).await?;
    stop(service).await
}

/// Stores no message and removes nothing.
struct Refuses;

#[async_trait]
impl Wire for Refuses {
    async fn carry(&self, call: Arc<Call>) -> postbox_core::Result<()> {
        if ["receive", "prune"].contains(&call.operation) {
            return Err(Error::new(ErrorKind::Unauthorized, "write", "permission_denied", "no right; grant it"));
        }
        call.execute();
        Ok(())
    }
}

#[tokio::test]
async fn what_fails_at_every_call_is_shown() -> Result<()> {
    let store = memory().client(Some(Arc::new(Refuses)));
    let text = webhook("partner") + "[retention]\nschedule = \"* * * * * *\"\n";
    let service = Service::start_on(config(&text)?, Arc::new(store)).await?;
    // Retention keeps nobody from sending and receiving.
    until("retention fails", async || {
        let (status, body) = get(service.address(), "/readyz").await?;
        Ok(status == 200 && body.contains("ready, but not everything works:\nretention: it has failed"))
    })
    .await?;
    let (_, page) = get(service.address(), "/metrics").await?;
    let gauge = "postbox_part_failing_since_seconds{part=\"retention\",code=\"permission_denied\"} ";
    ensure!(page.contains(gauge), "{page}");
    let (mut sent, body) = (0, "{\"type\":\"invoice.paid\"}");
    until("unready", async || {
        sent += 1;
        let head = signed("partner", &format!("msg_{sent}"), body)?;
        ensure!(exchange(service.address(), &head, body).await?.0 == 503);
        let (status, reasons) = get(service.address(), "/readyz").await?;
        Ok(status == 503 && reasons.contains("source partner: its messages cannot be stored since"))
    })
    .await?;
    let status = asked(&service).await?;
    let parts: Vec<_> = status.faults.iter().filter_map(|fault| fault.part.as_deref()).collect();
    ensure!(!status.ready && parts == ["storing", "retention"], "{status:?}");
    stop(service).await
}

/// Its first search for unrouted events panics.
struct PanicsOnce(AtomicUsize);

#[async_trait]
impl Wire for PanicsOnce {
    async fn carry(&self, call: Arc<Call>) -> postbox_core::Result<()> {
        if call.operation == "note_unrouted" {
            assert!(self.0.fetch_add(1, Ordering::SeqCst) > 0, "planted");
        }
        call.execute();
        Ok(())
    }
}

#[tokio::test]
async fn a_panic_in_the_search_for_unrouted_events_ends_neither_it_nor_the_service() -> Result<()> {
    let wire = Arc::new(PanicsOnce(AtomicUsize::default()));
    let store = memory().client(Some(Arc::clone(&wire) as Arc<dyn Wire>));
    let service = Service::start_on(config("")?, Arc::new(store)).await?;
    until("it goes on", async || Ok(wire.0.load(Ordering::SeqCst) > 1)).await?;
    ensure!(get(service.address(), "/healthz").await?.0 == 200);
    stop(service).await
}

#[tokio::test]
async fn it_can_be_stopped_at_any_moment_any_number_of_times() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let store = memory();
    for round in 0..20 {
        let service = start(&file_subscription(&folder.path().join("events.jsonl")), &store).await?;
        store.append(&LogName::outbox(), &[NewEvent::json("order.paid", "{}")]).await?;
        let early = service.stop_handle();
        for _ in 0..round % 4 {
            tokio::task::yield_now().await;
        }
        tokio::join!(async { early.cancel() }, async { service.stop() });
        timeout(DEADLINE, service.wait()).await??;
    }
    // Whatever was stopped in between, every event arrived exactly once.
    let last = start(&file_subscription(&folder.path().join("events.jsonl")), &store).await?;
    until("twenty lines", async || {
        let lines = std::fs::read_to_string(folder.path().join("events.jsonl"))?;
        Ok(lines.lines().count() == 20)
    })
    .await?;
    stop(last).await
}

#[tokio::test]
async fn a_schedule_delivers_at_its_time() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("events.jsonl");
    let store = memory();
    store.append(&LogName::outbox(), &[NewEvent::json("order.paid", "{}")]).await?;
    let text = file_subscription(&path).replace("sink =", "schedule = \"* * * * * *\"\nsink =");
    let service = start(&text, &store).await?;
    until("one line", async || Ok(std::fs::read_to_string(&path).unwrap_or_default().lines().count() == 1)).await?;
    stop(service).await
}

#[tokio::test]
async fn a_subscription_whose_events_wait_by_configuration_is_marked() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let plain = file_subscription(&folder.path().join("events.jsonl"));
    let nightly = file_subscription(&folder.path().join("nightly.jsonl"))
        .replace(".out]", ".nightly]\nschedule = \"0 0 3 * * *\"");
    let service = start(&format!("{plain}{nightly}[subscriptions.nowhere]\n"), &memory()).await?;
    let (_, page) = get(service.address(), "/metrics").await?;
    for (name, waits) in [("out", 0), ("nightly", 1), ("nowhere", 1)] {
        let line = format!("postbox_waits_by_configuration{{subscription=\"{name}\"}} {waits}\n");
        ensure!(page.contains(&line), "{line} is not in\n{page}");
    }
    stop(service).await
}

/// A source type whose queue is in memory.
struct Queue(Arc<MemorySource>);

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Queue")
    }
}

#[async_trait]
impl SourceConfig for Queue {
    fn log(&self) -> &LogName {
        static LOG: std::sync::LazyLock<LogName> = std::sync::LazyLock::new(LogName::inbox);
        &LOG
    }

    async fn build(&self, context: &SourceContext) -> postbox_core::Result<Arc<dyn Source>> {
        assert_eq!(context.name.as_str(), "orders");
        Ok(self.0.clone())
    }
}

fn message(id: &str) -> RawMessage {
    RawMessage {
        id: Some(id.to_owned()),
        digest: [0; 32],
        topic: "order.paid".into(),
        key: None,
        headers: Default::default(),
        content_type: "application/json".into(),
        payload: "{}".into(),
    }
}

#[tokio::test]
async fn a_pulled_source_is_received_from_until_the_stop() -> Result<()> {
    let (store, queue) = (memory(), Arc::new(MemorySource::new(64, Arc::new(TokioClock::new()))));
    // The broker is down when the service starts. It starts all the same.
    queue.disconnect();
    let mut config = config("[subscriptions.out]\n")?;
    config.sources.push(NamedSource::pulled("orders".parse()?, "queue", Arc::new(Queue(queue.clone()))));
    let service = Service::start_on(config, store.clone() as Arc<dyn Store>).await?;
    for id in ["1", "2", "1"] {
        queue.publish(message(id));
    }
    queue.publish(RawMessage { topic: "a b".into(), ..message("3") });
    until("all acknowledged", async || Ok(queue.acked().len() == 4)).await?;
    ensure!(store.count(&LogName::inbox()).await?.events == 3);
    let (_, page) = get(service.address(), "/metrics").await?;
    check_page(&page)?;
    for line in [
        "postbox_received_total{source=\"orders\",result=\"accepted\"} 3\n",
        "postbox_received_total{source=\"orders\",result=\"duplicate\"} 1\n",
        "postbox_duplicates_total{layer=\"inbox\",source=\"orders\"} 1\n",
        "postbox_poison_total{source=\"orders\"} 1\n",
        "postbox_source_errors_total{source=\"orders\"} 1\n",
    ] {
        ensure!(page.contains(line), "{line} is not in\n{page}");
    }
    // A source that ends is restarted.
    queue.close().await;
    queue.reopen();
    queue.publish(message("4"));
    until("received again", async || Ok(queue.acked().len() == 5)).await?;
    stop(service).await?;
    queue.reopen();
    queue.publish(message("5"));
    ensure!(store.count(&LogName::inbox()).await?.events == 4 && queue.remaining() == 1, "nothing after the stop");
    Ok(())
}
