//! The relays: the binary as an operator runs it.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::Rng;
use rand::rngs::SmallRng;
use tempfile::TempDir;

/// Events per batch in the storm's configuration.
pub(crate) const BATCH: usize = 200;
/// Lanes in the storm's configuration.
pub(crate) const LANES: usize = 4;

/// Far longer than anything takes.
const PATIENCE: Duration = Duration::from_secs(120);

const BINARY: &str = env!("CARGO_BIN_EXE_postbox");

/// Relays of one subscription, some of which die.
pub(crate) struct Relays {
    folder: TempDir,
    running: Vec<Relay>,
    started: usize,
    kills: usize,
}

impl Relays {
    /// Starts `count` replicas.
    pub(crate) fn start(store: &str, endpoint: &str, count: usize) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = format!(
            r#"
            [store]
            url = "{store}"
            [subscriptions.storm]
            topics = ["storm.*"]
            lanes = {LANES}
            batch = {BATCH}
            lease = "2s"
            concurrency = 32
            retry = {{ max_attempts = 50, base = "20ms", max = "200ms" }}
            sink = {{ type = "http", url = "{endpoint}", allow = ["127.0.0.1"], secret = "whsec_c3Rvcm0tc3Rvcm0tc3Rvcm0tc3Rvcm0tc3Rvcm0=" }}
            [server]
            listen = "127.0.0.1:0"
            "#
        );
        std::fs::write(folder.path().join("postbox.toml"), config).expect("a writable folder");
        let running = (1..=count).map(|number| Relay::start(&folder, number)).collect();
        Self { folder, running, started: count, kills: 0 }
    }

    /// SIGKILL to one, and another takes its place.
    ///
    /// A relay that found no database at its start has ended by itself, with a line that says so: like any supervisor, we start it again.
    pub(crate) fn kill_one(&mut self, random: &mut SmallRng) {
        for place in 0..self.running.len() {
            let Some(status) = self.running[place].child.try_wait().expect("our own child") else { continue };
            let log = self.running[place].log();
            let away = log.contains("(store_un") || log.contains("(store_timeout)");
            let refused = status.code() == Some(1) && away && !log.contains("lane taken");
            assert!(refused, "a relay ended by itself, {status}:\n{log}");
            self.replace(place);
        }
        let victim = random.random_range(0..self.running.len());
        self.running[victim].child.kill().expect("our own child can be killed");
        self.running[victim].child.wait().expect("our own child");
        self.replace(victim);
        self.kills += 1;
    }

    fn replace(&mut self, place: usize) {
        self.started += 1;
        self.running[place] = Relay::start(&self.folder, self.started);
    }

    /// How many died by our hand.
    pub(crate) fn kills(&self) -> usize {
        self.kills
    }

    /// SIGTERM; each must end with exit code 0. One that was started a moment ago may not catch signals yet: it says when it serves.
    pub(crate) async fn stop(mut self) {
        for relay in &self.running {
            until("a relay serves", || relay.log().contains("postbox serves").then_some(())).await;
            let kill = Command::new("kill").arg("-TERM").arg(relay.child.id().to_string()).status();
            assert!(kill.expect("kill runs").success());
        }
        for relay in &mut self.running {
            let status = relay.child.wait().expect("our own child");
            assert_eq!(status.code(), Some(0), "a clean stop exits 0:\n{}", relay.log());
        }
    }
}

impl Drop for Relays {
    fn drop(&mut self) {
        for relay in &mut self.running {
            let _ = relay.child.kill();
            let _ = relay.child.wait();
        }
    }
}

struct Relay {
    child: Child,
    log: PathBuf,
}

impl Relay {
    fn start(folder: &TempDir, number: usize) -> Self {
        let log = folder.path().join(format!("relay-{number}.log"));
        let child = Command::new(BINARY)
            .arg("run")
            .arg("--config")
            .arg(folder.path().join("postbox.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).expect("a writable folder"))
            .spawn()
            .expect("the binary starts");
        Self { child, log }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("a readable log")
    }
}

/// Waits until there is an answer.
pub(crate) async fn until<T>(what: &str, mut answer: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = answer() {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited too long until {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// `postbox migrate up`.
pub(crate) fn migrate(store: &str) {
    let status = Command::new(BINARY).args(["migrate", "up", "--store", store]).stdout(Stdio::null()).status();
    assert!(status.expect("the binary starts").success());
}

/// Waits until the store says that nothing is pending. The last arrival is not the last settlement: that comes a moment later, or a
/// lease later from the heir of one that was killed.
pub(crate) async fn settled(store: &str) {
    until("everything is settled", || stats(store).starts_with("pending=0 ").then_some(())).await;
}

/// The summary line of `postbox stats`.
pub(crate) fn stats(store: &str) -> String {
    let output = Command::new(BINARY).args(["stats", "--store", store]).output().expect("the binary starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}
