//! The file and stdout sinks: one JSON object per line.

use std::fs::Metadata;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use postbox_core::{Capabilities, Delivery, Envelope, Error, ErrorKind, Event, Outcome, Sink};
use tokio::fs::{File, OpenOptions};
use tokio::io::{AsyncReadExt, AsyncSeekExt, AsyncWrite, AsyncWriteExt, SeekFrom, Stdout};
use tokio::sync::Mutex;

/// Maximum events in one write. Each write is flushed once, and this bounds the line buffer.
const BATCH_MAX: usize = 500;

/// Writes each event as one JSON object on its own line, to a file or to stdout. The default is the
/// [envelope](Envelope::Json) with every field; other envelopes that are objects can be chosen.
///
/// A file is synced before its events count as delivered. After a crash the last lines may be
/// written again, with the same ids.
#[derive(Debug)]
pub struct JsonLines {
    output: Mutex<Output>,
    envelope: Envelope,
    source: String,
}

#[derive(Debug)]
struct Output {
    to: Destination,
    /// A call was written only in part, because it failed or was dropped. The next write must first
    /// end that line.
    is_torn: bool,
}

#[derive(Debug)]
enum Destination {
    File { file: File, path: PathBuf },
    Stdout(Stdout),
}

impl JsonLines {
    /// Appends to a file, creating it if needed. A line that a crash cut short is ended first, so
    /// that the next one is whole. A file that was removed or replaced since (by log rotation, for
    /// example) is opened again.
    pub async fn file(path: impl AsRef<Path>) -> postbox_core::Result<Self> {
        let path = path.as_ref().to_owned();
        let fault = |source: std::io::Error| {
            let text = format!("cannot append to {}: {source}", path.display());
            Error::new(ErrorKind::Invalid, "open file sink", "file_not_writable", text).with_source(source)
        };
        let file = open(&path).await.map_err(fault)?;
        Ok(Self::new(Destination::File { file, path }))
    }

    /// Writes to stdout.
    pub fn stdout() -> Self {
        Self::new(Destination::Stdout(tokio::io::stdout()))
    }

    fn new(to: Destination) -> Self {
        Self { output: Mutex::new(Output { to, is_torn: false }), envelope: Envelope::Json, source: "postbox".into() }
    }

    /// Sets the envelope, one of [`Envelope::OBJECTS`], and the CloudEvents source for events
    /// without one.
    pub fn envelope(self, envelope: Envelope, source: impl Into<String>) -> Self {
        Self { envelope, source: source.into(), ..self }
    }

    /// Returns the line of one event, including the line feed.
    fn line(&self, event: &Event) -> Result<Vec<u8>, Outcome> {
        let mut line = Vec::from(self.envelope.wrap(event, &self.source)?.body);
        // JSON has no raw line break inside a string, so every one is white space between tokens.
        line.iter_mut().filter(|byte| matches!(byte, b'\n' | b'\r')).for_each(|byte| *byte = b' ');
        line.push(b'\n');
        Ok(line)
    }
}

async fn open(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).append(true).read(true);
    // Readable by its owner only, because it holds payloads. An existing file keeps its mode.
    #[cfg(unix)]
    options.mode(0o600);
    let mut file = options.open(path).await?;
    end_torn_line(&mut file).await?;
    Ok(file)
}

/// Returns whether the path still leads to this file.
#[cfg(unix)]
async fn is_in_place(file: &Metadata, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let there = tokio::fs::metadata(path).await;
    there.is_ok_and(|there| (there.dev(), there.ino()) == (file.dev(), file.ino()))
}

#[cfg(not(unix))]
async fn is_in_place(_: &Metadata, path: &Path) -> bool {
    tokio::fs::try_exists(path).await.is_ok_and(|is_there| is_there)
}

/// Writes all bytes. At every moment `is_torn` is true if a part is written and the rest is not.
/// This holds even if the future is dropped: bytes that a write took stay written.
async fn write_all(to: &mut (impl AsyncWrite + Unpin), mut bytes: &[u8], is_torn: &mut bool) -> std::io::Result<()> {
    if *is_torn {
        to.write_all(b"\n").await?;
        *is_torn = false;
    }
    while !bytes.is_empty() {
        let taken = to.write(bytes).await?;
        bytes = &bytes[taken..];
        *is_torn = !bytes.is_empty();
        if taken == 0 {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
    }
    to.flush().await
}

/// Ends a torn last line. A special file (pipe, device) has no end to look at, so nothing is done.
async fn end_torn_line(file: &mut File) -> std::io::Result<()> {
    let metadata = file.metadata().await?;
    if !metadata.is_file() || metadata.len() == 0 {
        return Ok(());
    }
    let mut last = [0];
    file.seek(SeekFrom::End(-1)).await?;
    file.read_exact(&mut last).await?;
    if last != *b"\n" {
        file.write_all(b"\n").await?;
        file.flush().await?;
    }
    Ok(())
}

impl Output {
    /// Writes all or nothing, as far as the file system allows. If it is dropped midway it leaves
    /// half a line, which the next call ends.
    async fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let Self { to, is_torn } = self;
        match to {
            Destination::Stdout(stdout) => write_all(stdout, bytes, is_torn).await,
            Destination::File { file, path } => {
                let mut metadata = file.metadata().await?;
                if !is_in_place(&metadata, path).await {
                    *file = open(path).await?;
                    *is_torn = false;
                    metadata = file.metadata().await?;
                }
                let was_torn = *is_torn;
                let written = async {
                    write_all(file, bytes, is_torn).await?;
                    if metadata.is_file() { file.sync_data().await } else { Ok(()) }
                };
                let written = written.await;
                if written.is_err() && metadata.is_file() {
                    // The disk is full: remove the part that was written, or the repetition would
                    // follow half a line.
                    file.set_len(metadata.len()).await?;
                    *is_torn = was_torn;
                }
                written
            }
        }
    }

    fn name(&self) -> String {
        match &self.to {
            Destination::File { path, .. } => path.display().to_string(),
            Destination::Stdout(_) => "stdout".to_owned(),
        }
    }
}

#[async_trait]
impl Sink for JsonLines {
    fn capabilities(&self) -> Capabilities {
        // A call is written whole or not at all, so a failure stops every key.
        Capabilities { batch_max: BATCH_MAX, concurrency: 1, prefix: true, system: Some("file") }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let lines = deliveries.iter().map(|delivery| self.line(&delivery.event)).collect::<Vec<_>>();
        let bytes: Vec<u8> = lines.iter().flatten().flatten().copied().collect();
        let mut output = self.output.lock().await;
        let written = output.write(&bytes).await;
        let outcome = |line: Result<Vec<u8>, Outcome>| match (line, &written) {
            (Err(dead), _) => dead,
            (Ok(_), Ok(())) => Outcome::DELIVERED,
            (Ok(_), Err(error)) => Outcome::unavailable("write_failed", format!("{}: {error}", output.name())),
        };
        lines.into_iter().map(outcome).collect()
    }

    async fn close(&self) {
        let mut output = self.output.lock().await;
        // Everything delivered is flushed already. What a failed call left is repeated later.
        _ = output.write(b"").await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;
    use postbox_core::{EventId, NewEvent};

    #[tokio::test]
    async fn an_event_stays_on_one_line_in_every_envelope() {
        let id: EventId = "01890000-0000-7000-8000-000000000001".parse().expect("an id");
        let pretty = NewEvent::json("t", "{\r\n  \"a\": \"x\\ny\"\n}").into_event(id, Timestamp::UNIX_EPOCH);
        for envelope in Envelope::OBJECTS {
            let line = JsonLines::stdout().envelope(envelope, "postbox").line(&pretty).expect("a line");
            let line = String::from_utf8(line).expect("UTF-8");
            assert_eq!((line.matches('\n').count(), line.matches('\r').count()), (1, 0));
            assert!(line.ends_with('\n') && line.contains(r#"{    "a": "x\ny" }"#), "{line}");
        }
    }

    #[tokio::test]
    async fn what_does_not_fit_the_envelope_is_dead_and_its_neighbours_are_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        let sink = JsonLines::file(&path).await.expect("opened").envelope(Envelope::Standard, "postbox");
        let (one, mut two, three) = (delivery(1), delivery(2), delivery(3));
        two.event.payload = "{".into();
        let outcomes = sink.deliver(&[&one, &two, &three]).await;
        assert!(matches!(&outcomes[1], Outcome::Dead { code, .. } if code == Envelope::NOT_JSON), "{outcomes:?}");
        assert!(outcomes[0].is_delivered() && outcomes[2].is_delivered());
        let text = std::fs::read_to_string(&path).expect("read");
        assert_eq!(text, "{\"type\":\"t\",\"timestamp\":\"1970-01-01T00:00:00Z\",\"data\":{}}\n".repeat(2));
    }

    fn delivery(number: i64) -> Delivery {
        let id: EventId = "01890000-0000-7000-8000-000000000001".parse().expect("an id");
        let event = NewEvent::json("t", "{}").version(number).into_event(id, Timestamp::UNIX_EPOCH);
        Delivery { event, seq: postbox_core::Seq(number), attempt: 1, replay: 0, trace: None }
    }

    #[tokio::test]
    async fn a_torn_line_is_ended_and_lines_are_appended() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        std::fs::write(&path, "{\"whole\":1}\n{\"torn").expect("written");
        let sink = JsonLines::file(&path).await.expect("opened");
        let (one, two) = (delivery(1), delivery(2));
        assert_eq!(sink.deliver(&[&one, &two]).await, [Outcome::DELIVERED, Outcome::DELIVERED]);
        sink.close().await;
        let text = std::fs::read_to_string(&path).expect("read");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[..2], ["{\"whole\":1}", "{\"torn"]);
        assert!(lines[2].contains("\"version\":1") && lines[3].contains("\"version\":2") && lines.len() == 4, "{text}");
    }

    #[tokio::test]
    async fn a_file_that_was_removed_or_rotated_is_opened_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, old) = (folder.path().join("events.jsonl"), folder.path().join("events.jsonl.1"));
        let sink = JsonLines::file(&path).await.expect("opened");
        assert_eq!(sink.deliver(&[&delivery(1)]).await, [Outcome::DELIVERED]);
        std::fs::rename(&path, &old).expect("rotated");
        assert_eq!(sink.deliver(&[&delivery(2)]).await, [Outcome::DELIVERED]);
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(sink.deliver(&[&delivery(3)]).await, [Outcome::DELIVERED]);
        let text = |path| std::fs::read_to_string(path).expect("read");
        assert!(text(&old).contains("\"version\":1") && text(&path).contains("\"version\":3"));
        assert_eq!((text(&old).lines().count(), text(&path).lines().count()), (1, 1));
        folder.close().expect("removed");
        let outcomes = sink.deliver(&[&delivery(4)]).await;
        assert!(matches!(&outcomes[..], [Outcome::Unavailable { code, .. }] if code == "write_failed"), "{outcomes:?}");
    }

    /// The reader of a pipe stalls; the relay drops the call and sends all of it again.
    #[tokio::test]
    async fn a_call_that_was_given_up_leaves_a_line_of_its_own() {
        let (mut writer, mut reader) = tokio::io::duplex(10);
        let mut is_torn = false;
        let first = write_all(&mut writer, b"{\"first\":1}\n{\"second\":2}\n", &mut is_torn);
        assert!(futures::future::poll_immediate(std::pin::pin!(first)).await.is_none(), "ten bytes fit");
        assert!(is_torn);
        let read = tokio::spawn(async move {
            let mut text = String::new();
            reader.read_to_string(&mut text).await.map(|_| text)
        });
        write_all(&mut writer, b"{\"first\":1}\n{\"second\":2}\n", &mut is_torn).await.expect("written");
        assert!(!is_torn);
        drop(writer);
        let text = read.await.expect("a task").expect("read");
        assert_eq!(text, "{\"first\":1\n{\"first\":1}\n{\"second\":2}\n");
    }

    #[tokio::test]
    async fn a_full_disk_is_a_destination_that_is_down() {
        let sink = JsonLines::file("/dev/full").await.expect("opened");
        let outcomes = sink.deliver(&[&delivery(1)]).await;
        assert!(matches!(&outcomes[..], [Outcome::Unavailable { code, .. }] if code == "write_failed"), "{outcomes:?}");
    }

    #[tokio::test]
    async fn a_folder_that_is_not_there_is_named() {
        let error = JsonLines::file("/nowhere/events.jsonl").await.expect_err("refused");
        assert_eq!(error.code(), "file_not_writable");
        assert!(error.message().contains("/nowhere/events.jsonl"));
    }
}
