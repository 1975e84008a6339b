//! `examples/verify`: the receivers in other languages accept what our signer makes, and nothing
//! else.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use postbox_webhook::UnixSeconds;
use postbox_webhook::standard::{SignKey, Signer, SigningKey};

use crate::senders::{OTHER, SECRET};

const SEED: &str = "whsk_VEVTVFNJR05JTkdLRVlET05PVFVTRVRISVNGT1JBTlk=";
const BODY: &[u8] = "{\"order\": 42, \"name\": \"Zoë\"}".as_bytes();
/// Longest wait for an answer; the servers answer in a millisecond.
const PATIENCE: Duration = Duration::from_secs(30);

/// A sample that runs as a server, on a port chosen by the system.
struct Sample {
    child: Child,
    port: u16,
    /// Kept open, because a server that cannot print fails.
    _output: BufReader<ChildStdout>,
}

impl Sample {
    fn start(program: &str, file: &str, secrets: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/verify").join(file);
        let mut command = Command::new(program);
        command.arg(path).arg("0").env("WEBHOOK_SECRETS", secrets).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{program} must be installed: {error}"));
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        output.read_line(&mut line).expect("a line");
        let port = line.trim().rsplit(' ').next().and_then(|port| port.parse().ok());
        Self { port: port.unwrap_or_else(|| panic!("{file} says {line:?}")), child, _output: output }
    }

    /// Posts and returns the status.
    fn post(&self, headers: &[(&str, &str)], body: &[u8]) -> String {
        self.post_as(&body.len().to_string(), headers, body)
    }

    /// The same with a `content-length` that may be false.
    fn post_as(&self, length: &str, headers: &[(&str, &str)], body: &[u8]) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut request = format!("POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n");
        headers.iter().for_each(|(name, value)| request += &format!("{name}: {value}\r\n"));
        stream.write_all(&[request.as_bytes(), b"\r\n", body].concat()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer.split(' ').nth(1).unwrap_or_default().to_owned()
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    i64::try_from(now.as_secs()).expect("fits")
}

/// Posts every case and checks the status.
fn try_all(sample: &Sample, key: &str) {
    let key = || SignKey::parse(key).expect("a key");
    let other = || SignKey::parse(OTHER).expect("a key");
    let sign = |keys: Vec<SignKey>, age: i64| {
        Signer::new(keys).expect("a signer").sign("msg_1", UnixSeconds(now() - age), BODY).expect("signed")
    };
    let fresh = sign(vec![key()], 0);
    let [id, time, signature] = fresh.headers();
    assert_eq!(sample.post(&[id, time, signature], BODY), "204");
    assert_eq!(sample.post(&sign(vec![other(), key()], 0).headers(), BODY), "204", "one of two keys");
    assert_eq!(sample.post(&sign(vec![key()], 200).headers(), BODY), "204", "within the tolerance");
    assert_eq!(sample.post(&sign(vec![key()], 400).headers(), BODY), "401", "too old");
    assert_eq!(sample.post(&sign(vec![key()], -400).headers(), BODY), "401", "from the future");
    assert_eq!(sample.post(&sign(vec![other()], 0).headers(), BODY), "401", "another key");
    assert_eq!(sample.post(&[id, time, signature], &BODY[1..]), "401", "another body");
    assert_eq!(sample.post(&[("webhook-id", "msg_2"), time, signature], BODY), "401", "another id");
    assert_eq!(sample.post(&[("webhook-id", "m.1"), time, signature], BODY), "401", "an id with a dot");
    for wrong in ["", "v1", "v1,", "v2,AAAA", &signature.1[..20], &format!("v9{}", &signature.1[2..])] {
        assert_eq!(sample.post(&[id, time, ("webhook-signature", wrong)], BODY), "401", "{wrong:?}");
    }
    for wrong in ["", "x", "-1", "1e9", "99999999999999999999"] {
        assert_eq!(sample.post(&[id, ("webhook-timestamp", wrong), signature], BODY), "401", "{wrong:?}");
    }
    // Another encoding of the right code is not accepted.
    let code = |version: &str| signature.1.strip_prefix(version).map(str::to_owned);
    let (version, code) = match code("v1,") {
        Some(code) => ("v1,", code),
        None => ("v1a,", code("v1a,").expect("one of the two")),
    };
    let unpadded = code.trim_end_matches('=');
    let spellings = [
        code.replace('+', "-").replace('/', "_"),
        unpadded.to_owned(),
        format!("{code}="),
        format!("{}\t{}", &code[..20], &code[20..]),
        format!("{code},"),
        format!("{code},x"),
    ];
    for spelling in spellings.into_iter().filter(|spelling| *spelling != code) {
        let wrong = format!("{version}{spelling}");
        assert_eq!(sample.post(&[id, time, ("webhook-signature", &wrong)], BODY), "401", "{wrong:?}");
    }
    // A repeated header is ambiguous, equal or not, whichever comes first.
    for (twice, other) in [(id, "msg_2"), (time, "1"), (signature, "v1,AAAA")] {
        let all = [id, time, signature];
        for other in [other, twice.1] {
            let after = [&all[..], &[(twice.0, other)]].concat();
            let before = [&[(twice.0, other)], &all[..]].concat();
            assert_eq!(sample.post(&after, BODY), "401", "{} twice", twice.0);
            assert_eq!(sample.post(&before, BODY), "401", "{} twice", twice.0);
        }
    }
    for length in ["-1", "x", "99999999999", "+1", "1, 2"] {
        let status = sample.post_as(length, &[id, time, signature], b"");
        assert!(["400", "413"].contains(&status.as_str()), "content-length {length}: {status:?}");
    }
    for missing in 0..3 {
        let mut headers = vec![id, time, signature];
        headers.remove(missing);
        assert_eq!(sample.post(&headers, BODY), "401", "without header {missing}");
    }
}

#[test]
fn the_python_receiver_takes_what_we_sign_and_nothing_else() {
    try_all(&Sample::start("python3", "verify.py", SECRET), SECRET);
}

#[test]
fn the_node_receiver_takes_what_we_sign_and_nothing_else() {
    let public = SigningKey::parse(SEED).expect("a key").public_key();
    let sample = Sample::start("node", "verify.mjs", &format!("{SECRET} {public}"));
    try_all(&sample, SECRET);
    try_all(&sample, SEED);
}
