//! The part of the Postgres protocol that shows which call a connection carries and its answer.

/// Codes in the first message for requests of security (SSL, GSS). That message has no type byte.
const SECURITY_REQUESTS: [u32; 2] = [80_877_103, 80_877_104];
/// Possible major versions in the first message: a protocol version, or a request for security or
/// cancellation.
const FIRST_MAJORS: [u32; 2] = [3, 1_234];
/// Longest first message. So its first byte is zero, unlike that of any other protocol.
const FIRST_BYTES_MAX: usize = 10_000;

/// One message of a client.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    /// The statement it names.
    pub(super) statement: Option<String>,
    /// Whether the server answers everything up to here at once, ending with `ReadyForQuery`.
    pub(super) asks: bool,
    /// Whether the present call ends here: it ends its transaction, or there is none.
    pub(super) last: bool,
}

/// The conversation of client and server on one connection so far.
///
/// A call is a statement that is its own transaction, or everything from `BEGIN` to `COMMIT`.
#[derive(Debug, Default)]
pub(super) struct Talk {
    /// Not Postgres, or encrypted: the bytes cannot be parsed.
    pub(super) raw: bool,
    started: bool,
    /// Single-byte answers that the server still owes.
    bare: usize,
    /// Whether a transaction is open, by the client's messages.
    open: bool,
    over: bool,
    /// The statements of the present call.
    pub(super) call: Vec<String>,
    /// Number of answers the client has asked for, and number that have come.
    pub(super) asked: u64,
    pub(super) answered: u64,
    answer_over: bool,
    /// The server's answer to the latest call: command tags, and `ERROR` with its SQLSTATE.
    pub(super) answer: Vec<String>,
}

impl Talk {
    /// Returns the length of the client's next message, if it is complete.
    pub(super) fn next_asked(&mut self, bytes: &[u8]) -> Option<usize> {
        if !self.started && bytes.first().is_some_and(|first| *first != 0) {
            self.raw = true;
        }
        if self.raw {
            return whole(bytes);
        }
        let length = message_length(bytes, usize::from(self.started))?;
        if !self.started {
            let major = word(bytes.get(4..)?)? >> 16;
            self.raw = length > FIRST_BYTES_MAX || !FIRST_MAJORS.contains(&major);
        }
        if self.raw { whole(bytes) } else { (bytes.len() >= length).then_some(length) }
    }

    /// Processes a client's message.
    pub(super) fn ask(&mut self, message: &[u8]) -> Said {
        if self.raw {
            return Said::default();
        }
        if !self.started {
            let security = word(&message[4..]).is_some_and(|code| SECURITY_REQUESTS.contains(&code));
            self.started = !security;
            self.bare += usize::from(security);
            self.asked += u64::from(!security);
            return Said::default();
        }
        let statement = match message[0] {
            b'Q' => text(&message[5..]),
            // The statement's name comes first.
            b'P' => message[5..].iter().position(|byte| *byte == 0).and_then(|name| text(&message[5 + name + 1..])),
            _ => None,
        };
        if let Some(statement) = &statement {
            if std::mem::take(&mut self.over) {
                self.call.clear();
            }
            self.call.push(statement.clone());
            self.open = (self.open || begins(statement)) && !ends(statement);
        }
        let asks = matches!(message[0], b'Q' | b'S');
        self.asked += u64::from(asks);
        let last = asks && !self.open && !self.call.is_empty();
        self.over |= last;
        Said { statement, asks, last }
    }

    /// Returns the length of the server's next message, if it is complete.
    pub(super) fn next_answered(&mut self, bytes: &[u8]) -> Option<usize> {
        // A server that speaks first is not Postgres.
        self.raw |= !bytes.is_empty() && self.asked == 0 && self.bare == 0;
        if self.raw || self.bare > 0 {
            return if self.raw { whole(bytes) } else { bytes.first().map(|_| 1) };
        }
        message_length(bytes, 1).filter(|length| bytes.len() >= *length)
    }

    /// Processes a server's message. `Some` at the end of an answer: whether no transaction is
    /// open.
    pub(super) fn hear(&mut self, message: &[u8]) -> Option<bool> {
        if self.raw {
            return None;
        }
        if self.bare > 0 {
            self.bare -= 1;
            self.raw = message == b"S";
            return None;
        }
        let said = match message[0] {
            b'C' => text(&message[5..]),
            b'E' => message[5..].split(|byte| *byte == 0).find_map(|field| match field.split_first() {
                Some((b'C', code)) => Some(format!("ERROR {}", String::from_utf8_lossy(code))),
                _ => None,
            }),
            _ => None,
        };
        if let Some(said) = said {
            if std::mem::take(&mut self.answer_over) {
                self.answer.clear();
            }
            self.answer.push(said);
        }
        if message[0] != b'Z' {
            return None;
        }
        self.answered += 1;
        self.answer_over = message[5] == b'I';
        Some(self.answer_over)
    }
}

/// Returns the length of a message whose length field is at `offset`.
fn message_length(bytes: &[u8], offset: usize) -> Option<usize> {
    Some(offset + (word(bytes.get(offset..)?)? as usize).max(4))
}

fn word(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|word| u32::from_be_bytes(*word))
}

fn whole(bytes: &[u8]) -> Option<usize> {
    (!bytes.is_empty()).then_some(bytes.len())
}

fn text(bytes: &[u8]) -> Option<String> {
    bytes.split(|byte| *byte == 0).next().map(|text| String::from_utf8_lossy(text).into_owned())
}

fn begins(statement: &str) -> bool {
    let first = statement.trim_start().get(..5).unwrap_or_default();
    first.eq_ignore_ascii_case("BEGIN") || first.eq_ignore_ascii_case("START")
}

/// Returns whether the last statement in this text ends the transaction; `ROLLBACK TO` does not.
fn ends(statement: &str) -> bool {
    let last = statement.rsplit(';').map(str::trim).find(|part| !part.is_empty()).unwrap_or_default();
    ["COMMIT", "ROLLBACK", "END"].iter().any(|word| last.eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).expect("short").to_be_bytes();
        [&[kind], &length[..], body].concat()
    }

    fn started() -> Talk {
        let mut talk = Talk::default();
        let first = [&12_u32.to_be_bytes()[..], &196_608_u32.to_be_bytes(), b"a\0b\0"].concat();
        assert_eq!(talk.next_asked(&first[..7]), None);
        assert_eq!(talk.next_asked(&first), Some(12));
        talk.ask(&first);
        talk
    }

    #[test]
    fn a_call_is_one_statement_or_a_whole_transaction() {
        let mut talk = started();
        let mut last = |kind, body: &[u8]| talk.ask(&message(kind, body)).last;
        assert!(!last(b'P', b"\0SELECT 1\0\0\0"));
        assert!(last(b'S', b""));
        assert!(!last(b'Q', b"BEGIN; SET LOCAL jit = off\0"));
        assert!(!last(b'P', b"s1\0UPDATE t SET n = 1\0\0\0"));
        assert!(!last(b'S', b""));
        assert!(!last(b'Q', b"ROLLBACK TO here\0"));
        assert!(last(b'Q', b"commit ;\0"));
        assert!(last(b'Q', b"\nBEGIN; DROP TABLE t; COMMIT;\0"));
        assert_eq!(talk.call.len(), 1);
    }

    #[test]
    fn other_protocols_and_encrypted_ones_are_bytes() {
        let mut talk = Talk::default();
        assert_eq!(talk.next_asked(b"GET / HTTP/1.1"), Some(14));
        let mut talk = Talk::default();
        talk.ask(&[&8_u32.to_be_bytes()[..], &SECURITY_REQUESTS[0].to_be_bytes()].concat());
        assert_eq!(talk.next_answered(b"S"), Some(1));
        assert_eq!(talk.hear(b"S"), None);
        assert!(talk.raw);
        assert_eq!(Talk::default().next_answered(b"INFO {}\r\n"), Some(9), "it speaks first");
    }

    #[test]
    fn an_answer_is_known_by_its_tags_and_its_end() {
        let mut talk = started();
        assert_eq!(talk.hear(&message(b'Z', b"I")), Some(true));
        assert_eq!(talk.hear(&message(b'C', b"BEGIN\0")), None);
        assert_eq!(talk.hear(&message(b'Z', b"T")), Some(false));
        talk.hear(&message(b'E', b"SERROR\0C40001\0\0"));
        assert_eq!(talk.hear(&message(b'Z', b"I")), Some(true));
        assert_eq!(talk.answer, ["BEGIN", "ERROR 40001"]);
    }
}
