//! The hostile list: events that break naive stores, senders and receivers, each with what has to become of it.
//!
//! Everything is either delivered as it was, to the byte, or refused with a code of its own. The texts of the list are used by the
//! conformance suites of the stores; the whole of it goes through the running program from an append to an inbox.

use bytes::Bytes;
use postbox_core::NewEvent;
use postbox_core::limits::{HEADER_BYTES_MAX, HEADERS_MAX, KEY_BYTES_MAX, PAYLOAD_BYTES_MAX, TOPIC_BYTES_MAX};

/// What has to become of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It comes out as it went in.
    Delivered,
    /// The append refuses it with this code, and nothing is written.
    Refused(&'static str),
    /// Every store takes it; HTTP cannot carry it, so that it dies there with this code.
    DeadOverHttp(&'static str),
}

/// One event of the list.
#[derive(Debug, Clone)]
pub struct Case {
    /// What is hostile about it.
    pub name: String,
    /// The event.
    pub event: NewEvent,
    /// What has to become of it.
    pub fate: Fate,
}

/// Payloads that a store, a sender or a receiver may be tempted to understand.
pub fn payloads() -> Vec<Vec<u8>> {
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth)).into_bytes();
    vec![
        Vec::new(),
        vec![0],
        (0..=255).collect(),
        vec![0xff, 0xfe, 0xc0, 0x80, 0xed, 0xa0, 0x80],
        b"\xef\xbb\xbf{}".to_vec(),
        nested(127),
        nested(128),
        nested(10_000),
        nested(100_000),
        b"1e400".to_vec(),
        b"1e200000".to_vec(),
        b"-0".to_vec(),
        b"1234567890123456789012345".to_vec(),
        b"{\"a\":1,\"a\":2}".to_vec(),
        b"{ \"b\" : 1.0 ,\n\t\"a\":1.10 }\r\n".to_vec(),
        b"\"\\u0000\\ud800\"".to_vec(),
        b"{\"\":\"\"}".to_vec(),
        format!("[{}0]", "0,".repeat(100_000)).into_bytes(),
        b"[1,]".to_vec(),
        b"[NaN,-Infinity,0x1,'a']".to_vec(),
        b"{\"type\":\"another.topic\",\"id\":\"another-id\"}".to_vec(),
        "\"\u{202e}\u{200b}\u{feff}é𝄞\"".as_bytes().to_vec(),
        b"not json at all".to_vec(),
        b"\\x00\\000'; --".to_vec(),
        b"\\N".to_vec(),
        b"\x1b]0;owned\x07".to_vec(),
        b"=1+1,@SUM(A1),-1,+1".to_vec(),
        b"0\r\n\r\nPOST / HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
        b"1712345678.{\"a\":1}".to_vec(),
    ]
}

/// Names in any language, with any quote and wildcard: good topics, keys, tenants and aggregates.
pub fn names() -> Vec<&'static str> {
    vec![
        "zażółć.gęślą",
        "订单.已付",
        "\u{202e}rtl",
        "zero\u{200b}width",
        "🦀",
        "e\u{301}",
        "É",
        "é",
        "'",
        "\"",
        "';--",
        "';drop/**/table/**/postbox.outbox;--",
        "$1",
        "%s",
        "%",
        "%41",
        "%zz",
        "_",
        "*",
        ">",
        "\\",
        "\\x41",
        "a..b",
        ".",
        "..",
        ".a",
        "a.",
        "$JS.API",
        "$JS.API.STREAM.PURGE.x",
        "$SYS.REQ",
        "_INBOX.x",
        "__consumer_offsets",
        "amq.direct",
        "#",
        "null",
        "NULL",
        "{}",
        "{a,b}",
        "{tag}.x",
        "https://user:pw@h/?q#f",
        "#@h",
        "pg_catalog",
        "\u{fffd}",
        "\u{10ffff}",
    ]
}

/// Header values that have to survive a store.
pub fn header_values() -> Vec<&'static str> {
    vec!["", " ", "tab\there", "\"quoted\", 'and'", "back\\slash", "ünïcödé 🦀", "{\"json\":1}", "a=>b", "NULL", "%41"]
}

/// Header names that belong to HTTP, to credentials or to what we sign: never an event's to set.
pub const RESERVED_HEADERS: [&str; 12] = [
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "content-encoding",
    "authorization",
    "webhook-id",
    "webhook-signature",
    "ce-id",
    "ce-type",
    "ce-subject",
    "proxy-authorization",
];

/// The whole list, in a fixed order.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    sizes(&mut cases);
    texts(&mut cases);
    headers(&mut cases);
    cases
}

fn event() -> NewEvent {
    NewEvent::json("hostile", "{}")
}

fn add(cases: &mut Vec<Case>, name: impl Into<String>, fate: Fate, event: NewEvent) {
    cases.push(Case { name: name.into(), event, fate });
}

fn sizes(cases: &mut Vec<Case>) {
    const KIB: usize = 1024;
    let around = |border: usize| [border - 1, border, border + 1];
    for bytes in [around(256 * KIB), around(KIB * KIB)].concat() {
        add(cases, format!("{bytes} bytes"), Fate::Delivered, NewEvent::new("hostile", pattern(bytes), "a/b"));
    }
    for bytes in [PAYLOAD_BYTES_MAX - 1, PAYLOAD_BYTES_MAX] {
        add(cases, format!("{bytes} bytes"), Fate::Delivered, NewEvent::new("hostile", pattern(bytes), "a/b"));
    }
    for bytes in [PAYLOAD_BYTES_MAX + 1, 100 * KIB * KIB] {
        let event = NewEvent::new("hostile", Bytes::from(vec![0; bytes]), "a/b");
        add(cases, format!("{bytes} bytes"), Fate::Refused("payload_too_large"), event);
    }
    let long = |letter: &str, bytes: usize| letter.repeat(bytes / letter.len());
    for letter in ["k", "ż", "🦀"] {
        add(cases, format!("key of {letter} at the limit"), Fate::Delivered, event().key(long(letter, KEY_BYTES_MAX)));
        let topic = NewEvent::json(long(letter, TOPIC_BYTES_MAX), "{}");
        add(cases, format!("topic of {letter} at the limit"), Fate::Delivered, topic);
    }
    for bytes in [KEY_BYTES_MAX + 1, 64 * KIB] {
        add(cases, format!("key of {bytes} bytes"), Fate::Refused("key_too_long"), event().key(long("k", bytes)));
    }
    for bytes in [TOPIC_BYTES_MAX + 1, 300, 64 * KIB] {
        let event = NewEvent::json(long("t", bytes), "{}");
        add(cases, format!("topic of {bytes} bytes"), Fate::Refused("topic_too_long"), event);
    }
    for (name, count, fate) in
        [("one header too many", HEADERS_MAX + 1, "headers_too_many"), ("10,000 headers", 10_000, "headers_too_many")]
    {
        let full = (0..count).fold(event(), |event, n| event.header(format!("h-{n}"), "x"));
        add(cases, name, Fate::Refused(fate), full);
    }
    // One less than the limit: an inbox needs one for the sender's id of the message.
    let full = (1..HEADERS_MAX).fold(event(), |event, n| event.header(format!("h-{n}"), "x".repeat(200)));
    add(cases, "as many headers as an inbox holds", Fate::Delivered, full);
    let huge = event().header("huge", "x".repeat(HEADER_BYTES_MAX));
    add(cases, "headers over 16 KiB", Fate::Refused("headers_too_large"), huge);
    add(cases, "one header of 15 KiB", Fate::Delivered, event().header("huge", "x".repeat(15 * KIB)));
}

fn texts(cases: &mut Vec<Case>) {
    for (n, payload) in payloads().into_iter().enumerate() {
        let shown: String = String::from_utf8_lossy(&payload).chars().take(30).collect();
        add(
            cases,
            format!("payload {n} {shown:?} as JSON"),
            Fate::Delivered,
            NewEvent::json("hostile", payload.clone()),
        );
        let event = NewEvent::new("hostile", payload, "application/octet-stream");
        add(cases, format!("payload {n} {shown:?} as bytes"), Fate::Delivered, event);
    }
    for name in names() {
        let event = NewEvent::json(name, "{}").key(name).aggregate(name).kind(name).source(name).tenant(name);
        add(cases, format!("name {name:?}"), Fate::Delivered, event);
    }
    for key in [" ", " leading", "trailing ", "tab\t", "line\nbreak", "\r\nhost: x", "\u{1b}]0;owned", "\u{7f}\u{85}"] {
        add(cases, format!("key {key:?}"), Fate::Delivered, event().key(key));
    }
    for (topic, code) in [
        ("", "topic_empty"),
        (" ", "topic_invalid"),
        ("a b", "topic_invalid"),
        ("a\tb", "topic_invalid"),
        ("a\r\nb", "topic_invalid"),
        ("a\0b", "topic_invalid"),
        ("a\u{1b}[31m", "topic_invalid"),
        ("a\u{2028}b", "topic_invalid"),
    ] {
        add(cases, format!("topic {topic:?}"), Fate::Refused(code), NewEvent::json(topic, "{}"));
    }
    add(cases, "empty key", Fate::Refused("key_empty"), event().key(""));
    add(cases, "key with NUL", Fate::Refused("key_invalid"), event().key("a\0b"));
    add(cases, "empty tenant", Fate::Refused("tenant_empty"), event().tenant(""));
    add(cases, "tenant with NUL", Fate::Refused("tenant_invalid"), event().tenant("a\0b"));
    add(cases, "kind with a line break", Fate::Refused("kind_invalid"), event().kind("a\nb"));
    add(cases, "aggregate with NUL", Fate::Refused("aggregate_invalid"), event().aggregate("\0"));
    add(cases, "source with an escape", Fate::Refused("source_invalid"), event().source("\u{1b}"));
    let content_type = |text: &str| NewEvent::new("hostile", "x", text);
    for text in ["text/plain; charset=\"ütf-8\"", "not a type", "application/json;a=\"b\\\"c\"", "APPLICATION/JSON"] {
        add(cases, format!("content type {text:?}"), Fate::Delivered, content_type(text));
    }
    for text in ["", "a/b\r\nx: y", "a/b\0"] {
        let fate = Fate::Refused("content_type_invalid");
        add(cases, format!("content type {text:?}"), fate, content_type(text));
    }
}

fn headers(cases: &mut Vec<Case>) {
    for name in RESERVED_HEADERS {
        add(
            cases,
            format!("reserved header {name}"),
            Fate::Delivered,
            event().header(name, "forged").header("own", "1"),
        );
    }
    for value in header_values() {
        // HTTP has no white space around a value; what is only that cannot be told from nothing.
        add(cases, format!("header value {value:?}"), Fate::Delivered, event().header("x-value", value));
    }
    add(cases, "odd header name", Fate::Delivered, event().header("!#$%&'*+-.^_`|~", "odd"));
    let twice = event().header("Case", "1").header("case", "2");
    add(cases, "a header twice in different case", Fate::DeadOverHttp("header_duplicate"), twice);
    for value in ["a\r\nb: c", "a\nb", "a\rb", "a\0b", "\u{1b}[31m", "\u{85}"] {
        let fate = Fate::Refused("header_value_invalid");
        add(cases, format!("header value {value:?}"), fate, event().header("x-value", value));
    }
    for name in ["", "a b", "a:b", "a\r\nb", "a\0", "ü"] {
        let fate = Fate::Refused("header_name_invalid");
        add(cases, format!("header name {name:?}"), fate, event().header(name, "x"));
    }
}

/// Bytes that are no text and no repetition of a short period.
fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|n| (n % 251) as u8).collect()
}
