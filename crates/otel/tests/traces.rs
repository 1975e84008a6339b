//! A trace from the appending request to the handler in another service, as a collector receives
//! it.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use postbox_core::trace::TARGET;
use postbox_core::{Append as _, Clock, Delivery, Event, LogName, NewEvent, Outcome, SourceName, Subscription};
use postbox_engine::{Relay, TokioClock};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_ingress::{Ingress, WebhookSource};
use postbox_memory::MemoryStore;
use postbox_otel::{Exporter, ExporterConfig, propagate};
use postbox_router::handler_sink;
use postbox_testkit::collector::{Collector, Span};
use postbox_webhook::standard::SignKey;
use postbox_webhook::{Scheme, Settings, verifier};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tracing::{Instrument as _, info_span};
use tracing_subscriber::prelude::*;

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// The collector, and the runtime that the exporter sends on. They outlive the runtime of a single
/// test.
static EXPORT: LazyLock<(Runtime, Collector)> = LazyLock::new(|| {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let collector = runtime.block_on(Collector::start());
    let config = ExporterConfig {
        endpoint: collector.url(),
        service_name: "tests".to_owned(),
        sample_ratio: 1.0,
        headers: [("x-api-key".to_owned(), "k".to_owned())].into(),
    };
    let exporter = Exporter::start(config, runtime.handle().clone()).expect("it starts");
    tracing_subscriber::registry().with(exporter.layer()).init();
    assert!(propagate());
    std::mem::forget(exporter);
    (runtime, collector)
});

fn collector() -> &'static Collector {
    // In a separate thread, because the test's own runtime must not block.
    std::thread::spawn(|| &EXPORT.1).join().expect("it started")
}

struct Service {
    store: Arc<MemoryStore>,
    clock: Arc<dyn Clock>,
}

impl Service {
    fn new() -> Self {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
        Self { store: Arc::new(MemoryStore::new(Arc::clone(&clock))), clock }
    }

    async fn append(&self, event: NewEvent) {
        self.store.append(&LogName::outbox(), &[event]).await.expect("appended");
    }

    /// Posts the whole outbox to this URL, once.
    async fn relay_to(&self, url: String) {
        let config = HttpSinkConfig {
            keys: vec![SignKey::parse(SECRET).expect("a key")],
            allow: vec!["127.0.0.0/8".parse().expect("a network")],
            ..HttpSinkConfig::new(url)
        };
        let sink = HttpSink::new(config, Arc::clone(&self.clock)).expect("a sink");
        self.drain(LogName::outbox(), Arc::new(sink)).await;
    }

    /// Passes every event of a log to a handler that appends another event; returns what it saw.
    async fn handle(&self, log: LogName) -> Vec<Event> {
        let (seen, mut handled) = mpsc::unbounded_channel();
        let store = Arc::clone(&self.store);
        let handler = move |delivery: Delivery| {
            let (seen, store) = (seen.clone(), Arc::clone(&store));
            async move {
                let follow = NewEvent::json(format!("after.{}", delivery.event.topic), "{}");
                seen.send(delivery.event).expect("the test waits");
                store.append(&LogName::outbox(), &[follow]).await.map(drop)
            }
        };
        self.drain(log, Arc::new(handler_sink(handler))).await;
        handled.close();
        let mut events = Vec::new();
        while let Some(event) = handled.recv().await {
            events.push(event);
        }
        events
    }

    async fn drain(&self, log: LogName, sink: Arc<dyn postbox_core::Sink>) {
        let subscription = Subscription::new("reader".parse().expect("a name"), log);
        let relay = Relay::builder(self.store.clone(), subscription).sink(sink).build().expect("a relay");
        relay.drain(Some(1)).await.expect("drained");
    }

    /// The URL of its inbox.
    async fn inbox(&self) -> String {
        let verifier = verifier(Scheme::StandardWebhooks, &[SECRET], &Settings::default()).expect("a verifier");
        let source = WebhookSource::new(SourceName::new("peer").expect("a name"), LogName::inbox(), verifier);
        let ingress = Ingress::new(vec![source], self.store.clone(), Arc::clone(&self.clock)).expect("an ingress");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move { axum::serve(listener, postbox_ingress::router(ingress)).await });
        format!("http://{address}/in/peer")
    }
}

/// Waits for spans of these names.
async fn spans<const N: usize>(names: [&str; N]) -> [Span; N] {
    let has = |spans: &[Span], name: &str| spans.iter().any(|span| span.name == name);
    let all = collector().until(&names.join(", "), |spans| names.iter().all(|name| has(spans, name))).await;
    names.map(|name| all.iter().find(|span| span.name == name).expect("it came").clone())
}

fn attributes<const N: usize>(span: &Span, names: [&str; N]) -> [String; N] {
    names.map(|name| span.attributes.get(name).cloned().unwrap_or_default())
}

const OPERATION: [&str; 4] =
    ["messaging.system", "messaging.operation.name", "messaging.operation.type", "messaging.destination.name"];

#[tokio::test]
async fn one_trace_goes_from_the_request_to_the_handler_of_another_service() {
    let collector = collector();
    let (orders, mails) = (Service::new(), Service::new());
    let request = info_span!(target: TARGET, "POST /orders");
    orders.append(NewEvent::json("order.paid", "{}").correlation_id("c1")).instrument(request).await;
    orders.relay_to(mails.inbox().await).await;
    let handled = mails.handle(LogName::inbox()).await;
    let [request, create, send, receive, process, after] = spans([
        "POST /orders",
        "create order.paid",
        "send order.paid",
        "receive order.paid",
        "process order.paid",
        "create after.order.paid",
    ])
    .await;

    let chain = [&request, &create, &send, &receive, &process, &after];
    for pair in chain.windows(2) {
        assert_eq!(pair[1].trace, request.trace, "{}", pair[1].name);
        assert_eq!(pair[1].parent, pair[0].id, "the parent of {} is {}", pair[1].name, pair[0].name);
    }
    assert_eq!(request.parent, "");
    let kinds = [&create, &send, &receive, &process].map(|span| span.kind);
    assert_eq!(kinds, [SpanKind::Producer, SpanKind::Client, SpanKind::Client, SpanKind::Consumer]);
    assert_eq!(attributes(&create, OPERATION), ["postbox", "create", "create", "order.paid"]);
    assert_eq!(attributes(&send, OPERATION), ["http", "send", "send", "order.paid"]);
    assert_eq!(attributes(&receive, OPERATION), ["postbox", "receive", "receive", "order.paid"]);
    assert_eq!(attributes(&process, OPERATION), ["postbox", "process", "process", "order.paid"]);
    let id = attributes(&send, ["messaging.message.id"]);
    assert_eq!(attributes(&receive, ["messaging.message.id"]), id, "the sender's id");
    assert_eq!(attributes(&process, ["messaging.message.id"]), [handled[0].id.to_string()], "ours");
    for span in chain[1..5].iter().copied() {
        let said = attributes(span, ["messaging.message.conversation_id", "messaging.message.body.size"]);
        assert_eq!(said, ["c1", "2"], "{}", span.name);
        assert_eq!((&span.error, span.attributes.get("error.type")), (&None, None), "{}", span.name);
        let noise = span
            .attributes
            .keys()
            .find(|key| ["code.", "thread.", "target", "busy_ns"].iter().any(|it| key.starts_with(it)));
        assert_eq!(noise, None, "{}", span.name);
    }
    assert_eq!(handled[0].header("traceparent"), Some(&*format!("00-{}-{}-01", receive.trace, receive.id)));
    assert_eq!(handled[0].header("tracestate"), None);
    assert_eq!(send.service, "tests");
    assert!(collector.heads().iter().all(|head| head.starts_with("post /v1/traces ") && head.contains("x-api-key: k")));
}

#[tokio::test]
async fn a_failure_has_its_code() {
    collector();
    let service = Service::new();
    service.append(NewEvent::json("order.lost", "{}")).await;
    service.relay_to(service.inbox().await.replace("/in/peer", "/in/nobody")).await;
    let [create, send] = spans(["create order.lost", "send order.lost"]).await;
    assert_eq!(send.parent, create.id);
    assert_eq!(attributes(&send, ["error.type", "postbox.attempt"]), ["http_404", "1"]);
    assert!(send.error.is_some_and(|text| text.contains("404")), "and the text");
}

#[tokio::test]
async fn a_call_that_takes_too_long_has_its_code_too() {
    collector();
    let service = Service::new();
    service.append(NewEvent::json("order.slow", "{}")).await;
    let subscription = Subscription::new("reader".parse().expect("a name"), LogName::outbox());
    let never = handler_sink(|_: Delivery| std::future::pending::<()>());
    let settings = postbox_engine::RelaySettings { deliver_timeout: Duration::from_millis(10), ..Default::default() };
    let relay = Relay::builder(service.store.clone(), subscription).sink(Arc::new(never)).settings(settings);
    relay.build().expect("a relay").drain(Some(1)).await.expect("drained");
    let [process] = spans(["process order.slow"]).await;
    assert_eq!(attributes(&process, ["error.type"]), ["timeout"]);
}

#[tokio::test]
async fn a_delivered_event_has_its_position_at_the_destination() {
    collector();
    let service = Service::new();
    service.append(NewEvent::json("order.stored", "{}")).await;
    let stored = handler_sink(|_: Delivery| async { Outcome::delivered_at(false, "3@42") });
    service.drain(LogName::outbox(), Arc::new(stored)).await;
    let [process] = spans(["process order.stored"]).await;
    assert_eq!(attributes(&process, ["postbox.position", "error.type"]), ["3@42", ""]);
}

/// An invalid `traceparent` from a stranger becomes no parent, does no harm, and stays in the event
/// unchanged.
#[tokio::test]
async fn a_traceparent_that_is_none_is_nobodys_parent() {
    collector();
    let hostile = [
        "00-ab-cd-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b716920333é-01",
        "",
    ];
    let service = Service::new();
    let event = |n: usize| NewEvent::json(format!("hostile.n{n}"), "{}").header("traceparent", hostile[n]);
    for n in 0..hostile.len() {
        service.append(event(n)).await;
    }
    let subscription = Subscription::new("reader".parse().expect("a name"), LogName::outbox());
    let sink = handler_sink(move |delivery: Delivery| async move {
        let n: usize = delivery.event.topic.as_str()["hostile.n".len()..].parse().expect("a number");
        match delivery.event.header("traceparent") == Some(hostile[n]) {
            true => Outcome::DELIVERED,
            false => Outcome::dead("changed", "the header is another one"),
        }
    });
    let relay = Relay::builder(service.store.clone(), subscription).sink(Arc::new(sink)).build().expect("a relay");
    let drained = relay.drain(None).await.expect("drained");
    assert_eq!(drained.delivered, hostile.len() as u64);
    let names = ["n0", "n1", "n2", "n3", "n4", "n5"].map(|n| format!("process hostile.{n}"));
    let processed = spans(names.each_ref().map(String::as_str)).await;
    for span in processed {
        assert_eq!((span.parent.as_str(), span.links.len()), ("", 0), "{}", span.name);
        assert_ne!(span.trace, "0af7651916cd43dd8448eb211c80319c", "{}", span.name);
    }
}
