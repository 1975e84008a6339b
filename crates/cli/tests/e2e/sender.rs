//! A Standard Webhooks sender that keeps its connection, as providers do.

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use postbox_webhook::UnixSeconds;
use postbox_webhook::standard::{SignKey, Signer};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

/// The secret of the published Standard Webhooks vectors.
pub(crate) const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// A source called `partner` that accepts what [`Sender`] sends.
pub(crate) fn partner() -> String {
    format!("[sources.partner]\ntype = \"webhook\"\nscheme = \"standard-webhooks\"\nsecrets = [\"{SECRET}\"]\n")
}

/// One connection to one ingress.
pub(crate) struct Sender {
    signer: Signer,
    stream: BufReader<TcpStream>,
    /// Additional headers, each with its line break.
    pub(crate) more: String,
}

impl Sender {
    pub(crate) async fn connect(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            signer: Signer::new([SignKey::parse(SECRET)?])?,
            stream: BufReader::new(stream),
            more: String::new(),
        })
    }

    /// Sends a message signed now; returns the status.
    pub(crate) async fn send(&mut self, id: &str, body: &str) -> Result<u16> {
        self.send_at(Timestamp::now().as_second(), id, body).await
    }

    /// Sends a message signed now to another source.
    pub(crate) async fn send_to(&mut self, source: &str, id: &str, body: &str) -> Result<u16> {
        self.post(source, Timestamp::now().as_second(), id, body).await
    }

    /// Sends a message signed at this second.
    pub(crate) async fn send_at(&mut self, second: i64, id: &str, body: &str) -> Result<u16> {
        self.post("partner", second, id, body).await
    }

    async fn post(&mut self, source: &str, second: i64, id: &str, body: &str) -> Result<u16> {
        let signed = self.signer.sign(id, UnixSeconds(second), body.as_bytes())?;
        let mut request = format!("POST /in/{source} HTTP/1.1\r\nhost: test\r\n");
        for (name, value) in signed.headers() {
            request += &format!("{name}: {value}\r\n");
        }
        request += &self.more;
        request += &format!("content-length: {}\r\n\r\n{body}", body.len());
        self.stream.write_all(request.as_bytes()).await?;
        let mut line = String::new();
        self.stream.read_line(&mut line).await?;
        let status = line.split(' ').nth(1).context("no status line")?.parse()?;
        let mut length = 0;
        loop {
            line.clear();
            anyhow::ensure!(self.stream.read_line(&mut line).await? > 0, "it ended within the head");
            let head = line.trim_end().to_ascii_lowercase();
            if head.is_empty() {
                break;
            }
            if let Some(value) = head.strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
        }
        self.stream.read_exact(&mut vec![0; length]).await?;
        Ok(status)
    }
}
