//! Events that break naive stores, senders and receivers, each with its required result: it is
//! delivered as it was, to the byte, or refused with a specific code.

use postbox_core::NewEvent;
use postbox_core::limits::{HEADER_BYTES_MAX, HEADERS_MAX, KEY_BYTES_MAX, PAYLOAD_BYTES_MAX, TOPIC_BYTES_MAX};

/// The required result of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It comes out as it went in.
    Delivered,
    /// The append refuses it with this code, and nothing is written.
    Refused(&'static str),
    /// Every store accepts it, but HTTP cannot carry it, so it becomes dead there with this code.
    DeadOverHttp(&'static str),
}

/// One event of the list.
#[derive(Debug, Clone)]
pub struct Case {
    /// What is hostile about it.
    pub name: String,
    /// The event.
    pub event: NewEvent,
    /// The required result.
    pub fate: Fate,
}

/// Payloads that a store, a sender or a receiver may be tempted to parse.
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

/// Valid topics, keys, tenants and aggregates in any language, with any quote and wildcard.
pub fn names() -> Vec<&'static str> {
    const NAMES: &str = "zażółć.gęślą 订单.已付 \u{202e}rtl zero\u{200b}width 🦀 e\u{301} É é ' \" ';-- \
        ';drop/**/table/**/postbox.outbox;-- $1 %s % %41 %zz _ * > \\ \\x41 a..b . .. .a a. \
        $JS.API $JS.API.STREAM.PURGE.x $SYS.REQ _INBOX.x __consumer_offsets amq.direct # null \
        NULL {} {a,b} {tag}.x https://user:pw@h/?q#f #@h pg_catalog \u{fffd} \u{10ffff}";
    NAMES.split(' ').collect()
}

/// Header values that every store must preserve.
pub fn header_values() -> Vec<&'static str> {
    vec!["", " ", "tab\there", "\"quoted\", 'and'", "back\\slash", "ünïcödé 🦀", "{\"json\":1}", "a=>b", "NULL", "%41"]
}

/// Header names of HTTP, of credentials or of what we sign, which an event may never set.
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
    let mut add = |fate, name: String, event| cases.push(Case { name, event, fate });
    sizes(&mut add);
    texts(&mut add);
    headers(&mut add);
    cases
}

/// The part of the list that a store accepts.
pub fn accepted() -> impl Iterator<Item = Case> {
    cases().into_iter().filter(|case| !matches!(case.fate, Fate::Refused(_)))
}

/// Events with a key each, for destinations named after it: one for each of [`names`], then those
/// [`accepted`].
pub fn keyed() -> impl Iterator<Item = Case> {
    let odd = |name: &'static str| Case {
        name: format!("header {name:?}"),
        event: NewEvent::json(name, "odd").key(name).tenant(name).header("odd", name),
        fate: Fate::Delivered,
    };
    let keyed = |case: Case| Case {
        event: NewEvent { key: case.event.key.or_else(|| Some("k".to_owned())), ..case.event },
        ..case
    };
    names().into_iter().map(odd).chain(accepted().map(keyed))
}

fn event() -> NewEvent {
    NewEvent::json("hostile", "{}")
}

fn sizes(add: &mut impl FnMut(Fate, String, NewEvent)) {
    const KIB: usize = 1024;
    let around = |border: usize| [border - 1, border, border + 1];
    let sizes = [around(256 * KIB), around(KIB * KIB)].concat();
    for bytes in sizes.into_iter().chain([PAYLOAD_BYTES_MAX - 1, PAYLOAD_BYTES_MAX]) {
        // Bytes that are neither text nor the repetition of a short period.
        let pattern: Vec<u8> = (0..bytes).map(|n| (n % 251) as u8).collect();
        add(Fate::Delivered, format!("{bytes} bytes"), NewEvent::new("hostile", pattern, "a/b"));
    }
    for bytes in [PAYLOAD_BYTES_MAX + 1, 100 * KIB * KIB] {
        let event = NewEvent::new("hostile", vec![0; bytes], "a/b");
        add(Fate::Refused("payload_too_large"), format!("{bytes} bytes"), event);
    }
    let long = |letter: &str, bytes: usize| letter.repeat(bytes / letter.len());
    for letter in ["k", "ż", "🦀"] {
        add(Fate::Delivered, format!("key of {letter} at the limit"), event().key(long(letter, KEY_BYTES_MAX)));
        let topic = NewEvent::json(long(letter, TOPIC_BYTES_MAX), "{}");
        add(Fate::Delivered, format!("topic of {letter} at the limit"), topic);
    }
    for bytes in [KEY_BYTES_MAX + 1, 64 * KIB] {
        add(Fate::Refused("key_too_long"), format!("key of {bytes} bytes"), event().key(long("k", bytes)));
    }
    for bytes in [TOPIC_BYTES_MAX + 1, 300, 64 * KIB] {
        let event = NewEvent::json(long("t", bytes), "{}");
        add(Fate::Refused("topic_too_long"), format!("topic of {bytes} bytes"), event);
    }
    let with_headers = |count: usize, bytes: usize| {
        (0..count).fold(event(), |event, n| event.header(format!("h-{n}"), "x".repeat(bytes)))
    };
    for count in [HEADERS_MAX + 1, 10_000] {
        add(Fate::Refused("headers_too_many"), format!("{count} headers"), with_headers(count, 1));
    }
    // One below the limit, because an inbox needs one for the sender's message id.
    add(Fate::Delivered, "as many headers as an inbox holds".into(), with_headers(HEADERS_MAX - 1, 200));
    add(Fate::Refused("headers_too_large"), "headers over 16 KiB".into(), with_headers(1, HEADER_BYTES_MAX));
    add(Fate::Delivered, "one header of 15 KiB".into(), with_headers(1, 15 * KIB));
}

fn texts(add: &mut impl FnMut(Fate, String, NewEvent)) {
    for (n, payload) in payloads().into_iter().enumerate() {
        let shown: String = String::from_utf8_lossy(&payload).chars().take(30).collect();
        for content_type in ["application/json", "application/octet-stream"] {
            let event = NewEvent::new("hostile", payload.clone(), content_type);
            add(Fate::Delivered, format!("payload {n} {shown:?} as {content_type}"), event);
        }
    }
    for name in names() {
        let event = NewEvent::json(name, "{}").key(name).aggregate(name).kind(name).source(name).tenant(name);
        add(Fate::Delivered, format!("name {name:?}"), event);
    }
    for key in [" ", " leading", "trailing ", "tab\t", "line\nbreak", "\r\nhost: x", "\u{1b}]0;owned", "\u{7f}\u{85}"] {
        add(Fate::Delivered, format!("key {key:?}"), event().key(key));
    }
    add(Fate::Refused("topic_empty"), "empty topic".into(), NewEvent::json("", "{}"));
    for topic in [" ", "a b", "a\tb", "a\r\nb", "a\0b", "a\u{1b}[31m", "a\u{2028}b"] {
        add(Fate::Refused("topic_invalid"), format!("topic {topic:?}"), NewEvent::json(topic, "{}"));
    }
    for (code, event) in [
        ("key_empty", event().key("")),
        ("key_invalid", event().key("a\0b")),
        ("tenant_empty", event().tenant("")),
        ("tenant_invalid", event().tenant("a\0b")),
        ("kind_invalid", event().kind("a\nb")),
        ("aggregate_invalid", event().aggregate("\0")),
        ("source_invalid", event().source("\u{1b}")),
    ] {
        add(Fate::Refused(code), code.to_owned(), event);
    }
    let content_type = |text: &str| NewEvent::new("hostile", "x", text);
    for text in ["text/plain; charset=\"ütf-8\"", "not a type", "application/json;a=\"b\\\"c\"", "APPLICATION/JSON"] {
        add(Fate::Delivered, format!("content type {text:?}"), content_type(text));
    }
    for text in ["", "a/b\r\nx: y", "a/b\0"] {
        add(Fate::Refused("content_type_invalid"), format!("content type {text:?}"), content_type(text));
    }
}

fn headers(add: &mut impl FnMut(Fate, String, NewEvent)) {
    for name in RESERVED_HEADERS {
        let event = event().header(name, "forged").header("own", "1");
        add(Fate::Delivered, format!("reserved header {name}"), event);
    }
    for value in header_values() {
        // HTTP strips white space around a value, so a value of only white space arrives empty.
        add(Fate::Delivered, format!("header value {value:?}"), event().header("x-value", value));
    }
    add(Fate::Delivered, "odd header name".into(), event().header("!#$%&'*+-.^_`|~", "odd"));
    let twice = event().header("Case", "1").header("case", "2");
    add(Fate::DeadOverHttp("header_duplicate"), "a header twice in different case".into(), twice);
    for value in ["a\r\nb: c", "a\nb", "a\rb", "a\0b", "\u{1b}[31m", "\u{85}"] {
        let event = event().header("x-value", value);
        add(Fate::Refused("header_value_invalid"), format!("header value {value:?}"), event);
    }
    for name in ["", "a b", "a:b", "a\r\nb", "a\0", "ü"] {
        add(Fate::Refused("header_name_invalid"), format!("header name {name:?}"), event().header(name, "x"));
    }
}
