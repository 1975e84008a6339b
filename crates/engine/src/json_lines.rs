//! The file and stdout sinks: one JSON object per line.

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Capabilities, Delivery, Envelope, Error, ErrorKind, Event, Outcome, Sink};
use tokio::io::{AsyncWrite, AsyncWriteExt, Stdout};
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

/// Maximum events in one write. Each write is flushed once, and this bounds the line buffer.
const BATCH_MAX: usize = 500;

/// Longest wait for another process that writes to the same file. A write takes milliseconds; one
/// that takes longer is that of a stopped process, or of a disk that hangs.
const LOCK_TRIES_MAX: u32 = 1_000;
const LOCK_TRY_EVERY: Duration = Duration::from_millis(5);

/// The standard output of the process, which all sinks share, and whether a call left half a line.
static STDOUT: LazyLock<Mutex<(Stdout, bool)>> = LazyLock::new(|| Mutex::new((tokio::io::stdout(), false)));

/// Writes each event as one JSON object on its own line, to a file or to stdout. The default is the
/// [envelope](Envelope::Json) with every field; other envelopes that are objects can be chosen.
///
/// A file is synced before its events count as delivered. After a crash the last lines may be
/// written again, with the same ids. Several sinks and processes may append to one file: each write
/// holds the file's lock.
#[derive(Debug)]
pub struct JsonLines {
    to: Destination,
    envelope: Envelope,
    source: String,
}

#[derive(Debug)]
enum Destination {
    /// Lent to the task that writes, which a dropped call does not end.
    File(Arc<Mutex<LineFile>>),
    Stdout,
}

/// A file to which lines are appended.
#[derive(Debug)]
struct LineFile {
    file: File,
    path: PathBuf,
    /// A pipe or a device took a call only in part. The next write must first end that line.
    is_torn: bool,
}

impl JsonLines {
    /// Appends to a file, creating it if needed. Before the next line is written, one that a crash
    /// cut short is ended. A file that was removed or replaced since (by log rotation, for example)
    /// is opened again.
    pub async fn file(path: impl AsRef<Path>) -> postbox_core::Result<Self> {
        let path = path.as_ref().to_owned();
        let opened = match open(&path) {
            Ok(file) => LineFile { file, path, is_torn: false },
            Err(source) => {
                let shown = path.display();
                let text = format!("cannot append to {shown}: {source}; correct the path, or its permissions");
                return Err(
                    Error::new(ErrorKind::Invalid, "open file sink", "file_not_writable", text).with_source(source)
                );
            }
        };
        Ok(Self::new(Destination::File(Arc::new(Mutex::new(opened)))))
    }

    /// Writes to stdout.
    pub fn stdout() -> Self {
        Self::new(Destination::Stdout)
    }

    fn new(to: Destination) -> Self {
        Self { to, envelope: Envelope::Json, source: "postbox".into() }
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

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).append(true).read(true);
    // Readable by its owner only, because it holds payloads. An existing file keeps its mode.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Returns whether the path still leads to this file.
#[cfg(unix)]
fn is_in_place(file: &Metadata, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (file.dev(), file.ino()))
}

#[cfg(not(unix))]
fn is_in_place(_: &Metadata, path: &Path) -> bool {
    path.exists()
}

/// Locks a file against other writers, within a limit. A file system without locks has one writer.
fn lock(file: &File) -> io::Result<()> {
    for _ in 0..LOCK_TRIES_MAX {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => thread::sleep(LOCK_TRY_EVERY),
            Err(TryLockError::Error(error)) if error.kind() != io::ErrorKind::Unsupported => return Err(error),
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(()),
        }
    }
    Err(io::Error::new(io::ErrorKind::WouldBlock, "another process holds the lock of the file"))
}

impl LineFile {
    /// Writes all or nothing, as far as the file system allows.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        loop {
            let metadata = self.file.metadata()?;
            let is_file = metadata.is_file();
            if is_file {
                lock(&self.file)?;
            }
            if is_in_place(&metadata, &self.path) {
                let written = if is_file { self.write_locked(bytes) } else { self.write_all(bytes) };
                return if is_file { self.file.unlock().and(written) } else { written };
            }
            // Closing the former file ends its lock.
            self.file = open(&self.path)?;
            self.is_torn = false;
        }
    }

    /// Appends to a regular file. Nobody else writes to it meanwhile.
    fn write_locked(&mut self, bytes: &[u8]) -> io::Result<()> {
        let end = self.file.metadata()?.len();
        // A crash of any writer may have left half a line.
        self.is_torn = end > 0 && {
            let mut last = [0];
            self.file.seek(SeekFrom::End(-1))?;
            self.file.read_exact(&mut last)?;
            last != *b"\n"
        };
        let written = self.write_all(bytes).and_then(|()| self.file.sync_data());
        if written.is_err() {
            // The disk is full: remove the part that was written, or the repetition would follow
            // half a line.
            self.file.set_len(end)?;
        }
        written
    }

    fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        if self.is_torn {
            self.file.write_all(b"\n")?;
            self.is_torn = false;
        }
        while !bytes.is_empty() {
            let taken = match self.file.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                taken => taken?,
            };
            bytes = &bytes[taken..];
            self.is_torn = !bytes.is_empty();
            if taken == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }
}

/// Writes all bytes. At every moment `is_torn` is true if a part is written and the rest is not.
/// This holds even if the future is dropped: bytes that a write took stay written.
async fn write_all(to: &mut (impl AsyncWrite + Unpin), mut bytes: &[u8], is_torn: &mut bool) -> io::Result<()> {
    if *is_torn {
        to.write_all(b"\n").await?;
        *is_torn = false;
    }
    while !bytes.is_empty() {
        let taken = to.write(bytes).await?;
        bytes = &bytes[taken..];
        *is_torn = !bytes.is_empty();
        if taken == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
    }
    to.flush().await
}

impl JsonLines {
    /// Writes all bytes; `Err` has the destination's name.
    async fn write(&self, bytes: Vec<u8>) -> Result<(), String> {
        match &self.to {
            Destination::File(file) => {
                let mut file = Arc::clone(file).lock_owned().await;
                let writing = move || file.write(&bytes).map_err(|error| format!("{}: {error}", file.path.display()));
                spawn_blocking(writing).await.unwrap_or_else(|error| Err(error.to_string()))
            }
            Destination::Stdout => {
                let (stdout, is_torn) = &mut *STDOUT.lock().await;
                write_all(stdout, &bytes, is_torn).await.map_err(|error| format!("stdout: {error}"))
            }
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
        let written = self.write(bytes).await;
        let outcome = |line: Result<Vec<u8>, Outcome>| match (line, &written) {
            (Err(dead), _) => dead,
            (Ok(_), Ok(())) => Outcome::DELIVERED,
            (Ok(_), Err(error)) => Outcome::unavailable("write_failed", error.clone()),
        };
        lines.into_iter().map(outcome).collect()
    }

    async fn close(&self) {
        // Everything delivered is flushed already. What a failed call left is repeated later; only
        // its half line is ended.
        if matches!(self.to, Destination::Stdout) {
            _ = self.write(Vec::new()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;
    use postbox_core::{EventId, NewEvent};
    use tokio::io::AsyncReadExt as _;

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

    /// Two replicas, or two subscriptions. A batch is larger than what one write takes.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_writers_of_one_file_leave_every_line_whole() {
        const ROUNDS: usize = 10;
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        let mut large = delivery(1);
        large.event.payload = format!("{:?}", "x".repeat(20_000)).into();
        let writing = async |sink: JsonLines| {
            for _ in 0..ROUNDS {
                let outcomes = sink.deliver(&[&large; 250]).await;
                assert!(outcomes.iter().all(Outcome::is_delivered), "{outcomes:?}");
            }
        };
        let open = async || JsonLines::file(&path).await.expect("opened");
        tokio::join!(writing(open().await), writing(open().await));
        let text = std::fs::read_to_string(&path).expect("read");
        let length = text.lines().next().expect("a line").len();
        assert_eq!(text.lines().count(), 2 * ROUNDS * 250);
        assert!(text.lines().all(|line| line.len() == length), "a line was torn");
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
        assert!(error.message().contains("/nowhere/events.jsonl") && error.message().contains("; correct the path"));
    }
}
