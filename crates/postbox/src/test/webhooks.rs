//! Both ends of a webhook, on loopback: a sender to your sources, and a receiver for what your
//! service sends.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use postbox_core::{Error, ErrorKind, Event, LogName, Result, SourceName};
use postbox_engine::TokioClock;
use postbox_ingress::{Ingress, WebhookSource, router};
use postbox_listen::{ServeLimits, serve};
use postbox_memory::MemoryStore;
use postbox_webhook::Verify;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Serves an ingress on a free port as long as this lives. Post to it as a provider would.
///
/// ```
/// use postbox::test::Webhooks;
/// use postbox::webhook::{Settings, Scheme, UnixSeconds, stripe, verifier};
/// # use postbox::{ingress::WebhookSource, LogName, Service, test};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let secret = "whsec_test_0123456789";
/// # let verifier = verifier(Scheme::Stripe, &[secret], &Settings::default())?;
/// # let service = Service::builder(test::store())
/// #     .source(WebhookSource::new("stripe".parse()?, LogName::inbox(), verifier))
/// #     .build()?;
/// let webhooks = Webhooks::serve(service.ingress()).await?;
/// let body = br#"{"id": "evt_1", "type": "checkout.session.completed"}"#;
/// let signed = stripe::Secret::new(secret)?.sign(UnixSeconds(jiff::Timestamp::now().as_second()), body);
/// assert_eq!(webhooks.post("stripe", &signed, body).await?, 202);
/// assert_eq!(webhooks.post("stripe", &[], body).await?, 401);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Webhooks {
    address: SocketAddr,
    server: JoinHandle<()>,
}

impl Webhooks {
    /// Starts serving an ingress.
    pub async fn serve(ingress: Arc<Ingress>) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(away)?;
        let address = listener.local_addr().map_err(away)?;
        let clock = Arc::new(TokioClock::new());
        let never = std::future::pending();
        let server = tokio::spawn(serve(listener, router(ingress), ServeLimits::default(), clock, never));
        Ok(Self { address, server })
    }

    /// Returns the URL of a source.
    pub fn url(&self, source: &str) -> String {
        format!("http://{}/in/{source}", self.address)
    }

    /// Posts to a source, as JSON unless the headers say otherwise. Returns the status of the
    /// answer.
    pub async fn post(&self, source: &str, headers: &[(String, String)], body: &[u8]) -> Result<u16> {
        let mut head = format!(
            "POST /in/{source} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-length: {}\r\n",
            self.address,
            body.len()
        );
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
            head.push_str("content-type: application/json\r\n");
        }
        headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
        let asked = async {
            let mut connection = TcpStream::connect(self.address).await?;
            connection.write_all(&[head.as_bytes(), b"\r\n", body].concat()).await?;
            let mut answer = Vec::new();
            connection.read_to_end(&mut answer).await?;
            std::io::Result::Ok(answer)
        };
        let answer = asked.await.map_err(away)?;
        let answer = String::from_utf8_lossy(&answer);
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
        status.ok_or_else(|| away(std::io::ErrorKind::UnexpectedEof.into()))
    }
}

impl Drop for Webhooks {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn away(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, "test", "loopback_failed", error.to_string()).with_source(error)
}

/// A receiver on a free port that verifies what your service sends. Genuine messages are answered
/// with success and kept, each once. All others are refused as a careful receiver would. Allow the
/// sink its address: `HttpSinkConfig { allow: vec!["127.0.0.1/32".parse()?], … }`.
#[derive(Debug)]
pub struct Receiver {
    webhooks: Webhooks,
    store: MemoryStore,
}

impl Receiver {
    const SOURCE: &'static str = "test";

    /// Starts a receiver with a verifier, such as [`standard`](crate::webhook::standard)'s for the
    /// webhook sink.
    pub async fn start(verifier: Box<dyn Verify>) -> Result<Self> {
        let store = super::store();
        let source = WebhookSource::new(SourceName::new(Self::SOURCE)?, LogName::inbox(), verifier);
        let ingress = Ingress::new(vec![source], Arc::new(store.clone()), Arc::new(TokioClock::new()))?;
        Ok(Self { webhooks: Webhooks::serve(ingress).await?, store })
    }

    /// Returns the URL to send to.
    pub fn url(&self) -> String {
        self.webhooks.url(Self::SOURCE)
    }

    /// Returns the genuine messages received so far, in order.
    pub async fn received(&self) -> Result<Vec<Event>> {
        super::read(&self.store, LogName::inbox(), Vec::new()).await
    }
}
