//! The file and stdout sinks: one JSON object a line.

use std::path::{Path, PathBuf};

use async_trait::async_trait;
use postbox_core::{Capabilities, Delivery, Envelope, Error, ErrorKind, Event, Outcome, Sink};
use tokio::fs::{File, OpenOptions};
use tokio::io::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt, SeekFrom, Stdout};
use tokio::sync::Mutex;

/// Most events of one write: one flush each, and a bounded line buffer.
const BATCH_MAX: usize = 500;

/// Writes each event as one JSON object on a line of its own, to a file or to stdout: the
/// [envelope](Envelope::Json) with every field, or another that is an object.
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
enum Output {
    File { file: File, path: PathBuf },
    Stdout(Stdout),
}

impl JsonLines {
    /// Appends to a file, which is made if it is not there. A line cut short by a crash is ended,
    /// so that the next one is whole.
    pub async fn file(path: impl AsRef<Path>) -> postbox_core::Result<Self> {
        let path = path.as_ref().to_owned();
        let fault = |source: std::io::Error| {
            let text = format!("cannot append to {}: {source}", path.display());
            Error::new(ErrorKind::Invalid, "open file sink", "file_not_writable", text).with_source(source)
        };
        let mut options = OpenOptions::new();
        options.create(true).append(true).read(true);
        // For its owner alone: it holds payloads. A file that is there keeps its mode.
        #[cfg(unix)]
        options.mode(0o600);
        let open = options.open(&path).await;
        let mut file = open.map_err(&fault)?;
        end_torn_line(&mut file).await.map_err(&fault)?;
        Ok(Self::new(Output::File { file, path }))
    }

    /// Writes to stdout.
    pub fn stdout() -> Self {
        Self::new(Output::Stdout(tokio::io::stdout()))
    }

    fn new(output: Output) -> Self {
        Self { output: Mutex::new(output), envelope: Envelope::Json, source: "postbox".into() }
    }

    /// Sets the envelope, one of [`Envelope::OBJECTS`], and the CloudEvents source of events that
    /// name none.
    pub fn envelope(self, envelope: Envelope, source: impl Into<String>) -> Self {
        Self { envelope, source: source.into(), ..self }
    }

    /// The line of one event, line feed included.
    fn line(&self, event: &Event) -> Result<Vec<u8>, Outcome> {
        let mut line = Vec::from(self.envelope.wrap(event, &self.source)?.body);
        // JSON has no raw line break inside a string, so every one is white space between tokens.
        line.iter_mut().filter(|byte| matches!(byte, b'\n' | b'\r')).for_each(|byte| *byte = b' ');
        line.push(b'\n');
        Ok(line)
    }
}

/// A special file (pipe, device) has no end to look at, and no torn line to end.
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
    /// All of it or none, as far as the file system lets us.
    async fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Stdout(stdout) => {
                stdout.write_all(bytes).await?;
                stdout.flush().await
            }
            Self::File { file, .. } => {
                let metadata = file.metadata().await?;
                let written = async {
                    file.write_all(bytes).await?;
                    file.flush().await?;
                    if metadata.is_file() { file.sync_data().await } else { Ok(()) }
                };
                let written = written.await;
                if written.is_err() && metadata.is_file() {
                    // A full disk: take back the part that fitted, or the repetition would follow
                    // half a line.
                    file.set_len(metadata.len()).await?;
                }
                written
            }
        }
    }

    fn name(&self) -> String {
        match self {
            Self::File { path, .. } => path.display().to_string(),
            Self::Stdout(_) => "stdout".to_owned(),
        }
    }
}

#[async_trait]
impl Sink for JsonLines {
    fn capabilities(&self) -> Capabilities {
        // All of a call or nothing is written, so a failure stops every key.
        Capabilities { batch_max: BATCH_MAX, concurrency: 1, prefix: true }
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
        // Everything delivered is flushed already; what a failed call left is repeated.
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
        Delivery { event, seq: postbox_core::Seq(number), attempt: 1, replay: 0 }
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
