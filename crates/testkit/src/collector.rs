//! A collector of traces (OTLP over HTTP) in this process.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use postbox_core::hex;
use prost::Message as _;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Longest wait for spans. They arrive within seconds; this only turns a hang into a failure.
const DEADLINE: Duration = Duration::from_secs(60);

/// A span that arrived.
#[derive(Debug, Clone)]
pub struct Span {
    /// The program it came from.
    pub service: String,
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: SpanKind,
    /// The id of its trace, in hexadecimal.
    pub trace: String,
    /// Its own id.
    pub id: String,
    /// The id of its parent; empty for the first span of a trace.
    pub parent: String,
    /// Its attributes, as text.
    pub attributes: BTreeMap<String, String>,
    /// The error, if it has one.
    pub error: Option<String>,
    /// The spans it is linked to.
    pub links: Vec<String>,
}

/// Receives spans and stores them.
#[derive(Debug)]
pub struct Collector {
    address: SocketAddr,
    arrived: watch::Receiver<Arrived>,
}

/// What has arrived: the heads of requests, and the spans.
#[derive(Debug, Default)]
struct Arrived {
    heads: Vec<String>,
    spans: Vec<Span>,
}

impl Collector {
    /// Listens on loopback, for as long as the runtime runs.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (note, arrived) = watch::channel(Arrived::default());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, note.clone()));
            }
        });
        Self { address, arrived }
    }

    /// Returns the URL it listens on.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the heads of the requests so far, in lower case.
    pub fn heads(&self) -> Vec<String> {
        self.arrived.borrow().heads.clone()
    }

    /// Waits until `enough` accepts the spans, and returns all of them.
    pub async fn until(&self, what: &str, enough: impl Fn(&[Span]) -> bool) -> Vec<Span> {
        let mut arrived = self.arrived.clone();
        let waited = tokio::time::timeout(DEADLINE, arrived.wait_for(|arrived| enough(&arrived.spans))).await;
        if let Ok(Ok(arrived)) = waited {
            return arrived.spans.clone();
        }
        panic!("no {what}; there are {:#?}", self.arrived.borrow().spans);
    }
}

async fn serve(stream: TcpStream, note: watch::Sender<Arrived>) -> Option<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let (mut head, mut line) = (String::new(), String::new());
        while stream.read_line(&mut line).await.ok()? > 2 {
            head.push_str(&line.to_ascii_lowercase());
            line.clear();
        }
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?.trim().parse().ok()?;
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.ok()?;
        let request = ExportTraceServiceRequest::decode(&body[..]).expect("protobuf");
        note.send_modify(|arrived| {
            arrived.heads.push(head);
            arrived.spans.extend(spans(request));
        });
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.ok()?;
    }
}

fn spans(request: ExportTraceServiceRequest) -> Vec<Span> {
    let mut spans = Vec::new();
    for resource in request.resource_spans {
        let of_resource = attributes(resource.resource.unwrap_or_default().attributes);
        let service = of_resource.get("service.name").cloned().unwrap_or_default();
        for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            spans.push(Span {
                service: service.clone(),
                kind: span.kind(),
                trace: hex(&span.trace_id),
                id: hex(&span.span_id),
                parent: hex(&span.parent_span_id),
                attributes: attributes(span.attributes),
                error: span.status.filter(|status| status.code() == StatusCode::Error).map(|status| status.message),
                links: span.links.iter().map(|link| hex(&link.span_id)).collect(),
                name: span.name,
            });
        }
    }
    spans
}

fn attributes(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |value: Option<AnyValue>| match value.and_then(|value| value.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    attributes.into_iter().map(|KeyValue { key, value, .. }| (key, text(value))).collect()
}
