//! Genuine messages of every scheme, damaged in one place: a bit, a byte, a byte too many or too
//! few, two swapped, the end cut off; in the signature, the time, the id, the query, the body. None
//! may be accepted as anything else.
//!
//! `POSTBOX_TEST_MUTATIONS=10000000 POSTBOX_SEED=1 cargo test --release -p postbox-webhook --test it -- --nocapture mutations`
//! is the long version.
//!
//! Where a scheme signs bytes, every damaged message must be refused. Where it signs a *meaning*
//! (the parameters of Twilio's forms, the fields of SNS's JSON), the bytes can change while the
//! meaning stays (`%2b` for `%2B`, a space between fields); then it must be accepted as exactly the
//! same message, or refused. These cases are counted separately.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use postbox_webhook::sns::{Certificate, CertificateUrl, TopicArn};
use postbox_webhook::{Verify, sns};
use serde_json::json;

use crate::senders::{Kit, Message, SECRET, TIME};

/// Mutations in an ordinary run, which takes a few seconds.
const MUTATIONS: u64 = 200_000;
/// Number of messages per subject that are signed together and damaged many times, because RSA
/// signs slowly.
const POOL: usize = 24;
/// Number of mutations after which the messages are replaced.
const ROUND: u64 = 240_000;

/// Small, fast and repeatable: a step of `SplitMix64`.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).expect("below a usize")
    }
}

/// Describes what is accepted; `None` if it is refused.
type Receive = Box<dyn Fn(&Message) -> Option<String>>;

/// One scheme's sender and receiver.
struct Subject {
    name: String,
    /// Whether a meaning is signed rather than bytes.
    by_meaning: bool,
    send: Box<dyn Fn(&mut Random) -> Message>,
    receive: Receive,
}

fn subject(kit: Kit, verifier: Box<dyn Verify>) -> Subject {
    Subject {
        name: format!("{kit:?}"),
        by_meaning: kit == Kit::TwilioForm,
        send: Box::new(move |random| kit.genuine(SECRET, TIME, &body(kit, random))),
        receive: Box::new(move |message| message.verify(&*verifier, TIME).ok().map(|it| format!("{it:?}"))),
    }
}

fn sns_subject() -> Subject {
    let topic = "arn:aws:sns:eu-central-1:123456789012:orders";
    let url = "https://sns.eu-central-1.amazonaws.com/a.pem";
    let parsed = CertificateUrl::parse(url).expect("a URL");
    let certificate =
        Certificate::from_pem(&parsed, include_bytes!("../fixtures/sns/signing.pem")).expect("a certificate");
    let verifier = sns::Verifier::new([TopicArn::parse(topic).expect("a topic")]).expect("a verifier");
    let send = move |random: &mut Random| {
        let mut message = json!({
            "Type": "Notification", "MessageId": format!("id-{}", random.next()), "TopicArn": topic,
            "Message": String::from_utf8_lossy(&body(Kit::Plain, random)), "Timestamp": "2030-01-01T00:00:00.000Z",
            "SignatureVersion": "2", "SigningCertURL": url, "UnsubscribeURL": "https://example.org/",
        });
        match random.below(3) {
            0 => {}
            1 => message["Subject"] = json!("My First Message"),
            _ => {
                message["Type"] = json!("SubscriptionConfirmation");
                message["Token"] = json!("abc123");
                let subscribe = "https://sns.eu-central-1.amazonaws.com/?Action=ConfirmSubscription";
                message["SubscribeURL"] = json!(format!("{subscribe}&TopicArn={topic}&Token=abc123"));
            }
        }
        Message { fields: Vec::new(), query: None, body: crate::sns::signed(message).into_bytes() }
    };
    let receive = move |message: &Message| {
        let unverified = verifier.read(&message.body).ok()?;
        let genuine = unverified.verify(&certificate, postbox_webhook::UnixSeconds(TIME)).ok()?;
        Some(match genuine {
            sns::Message::Notification(it) => format!("{it:?}"),
            sns::Message::SubscriptionConfirmation(it) | sns::Message::UnsubscribeConfirmation(it) => {
                format!("{it:?} {} {} {}", it.token, it.subscribe_url.as_str(), it.message)
            }
        })
    };
    Subject { name: "Sns".into(), by_meaning: true, send: Box::new(send), receive: Box::new(receive) }
}

fn subjects() -> Vec<Subject> {
    let mut subjects: Vec<Subject> = Kit::ALL.into_iter().map(|kit| subject(kit, kit.verifier())).collect();
    subjects.push(sns_subject());
    subjects
}

fn body(kit: Kit, random: &mut Random) -> Vec<u8> {
    if kit == Kit::TwilioForm {
        let names = ["CallSid", "Caller", "Digits", "From", "To"];
        let pairs: Vec<String> = names.iter().map(|name| format!("{name}={}", random.next())).collect();
        return pairs.join("&").into_bytes();
    }
    let length = random.below(160);
    match random.below(3) {
        0 => (0..length).map(|_| random.next() as u8).collect(),
        1 => format!(r#"{{"id":"evt_{}","amount":10.00,"note":"Zoë 📦"}}"#, random.next()).into_bytes(),
        _ => (0..length).map(|_| b' ' + (random.next() % 95) as u8).collect(),
    }
}

/// Damages one place; `None` if nothing changed.
fn damaged(genuine: &Message, random: &mut Random) -> Option<Message> {
    let mut message = genuine.clone();
    let parts = message.fields.len() + 2;
    let part = random.below(parts);
    let bytes = match (part, &mut message.query) {
        (0, _) | (1, None) => &mut message.body,
        (1, Some(query)) => query,
        (part, _) => &mut message.fields[part - 2].1,
    };
    let at = random.below(bytes.len() + 1);
    let byte = random.next() as u8;
    match random.below(8) {
        // Single bits are flipped as often as everything else together.
        0..=3 if at < bytes.len() => bytes[at] ^= 1 << (byte % 8),
        4 if at < bytes.len() => bytes[at] = byte,
        5 if at < bytes.len() => drop(bytes.remove(at)),
        6 => bytes.insert(at, byte),
        7 if at + 1 < bytes.len() => bytes.swap(at, at + 1),
        _ => bytes.truncate(at),
    }
    (message != *genuine).then_some(message)
}

/// The results of the mutations.
#[derive(Debug, Default)]
struct Tally {
    tried: u64,
    /// Other bytes, accepted as the same message.
    respelt: u64,
    /// Accepted as something that was never sent.
    forged: Vec<String>,
}

fn hunt(subjects: &[Subject], mutations: u64, seed: u64) -> Tally {
    let mut random = Random(seed);
    let mut tally = Tally::default();
    let mut pools: Vec<Vec<(Message, String)>> = Vec::new();
    while tally.tried < mutations && tally.forged.is_empty() {
        if pools.is_empty() || tally.tried % ROUND == 0 {
            pools = subjects.iter().map(|subject| pool(subject, &mut random)).collect();
        }
        let place = random.below(subjects.len());
        let subject = &subjects[place];
        let (genuine, meaning) = &pools[place][random.below(POOL)];
        let Some(message) = damaged(genuine, &mut random) else { continue };
        tally.tried += 1;
        match (subject.receive)(&message) {
            None => {}
            Some(accepted) if subject.by_meaning && accepted == *meaning => tally.respelt += 1,
            Some(accepted) => tally.forged.push(format!("{}: {message:?} as {accepted}", subject.name)),
        }
    }
    tally
}

fn pool(subject: &Subject, random: &mut Random) -> Vec<(Message, String)> {
    let fresh = |_| {
        let message = (subject.send)(random);
        let accepted = (subject.receive)(&message);
        let accepted = accepted.unwrap_or_else(|| panic!("{} refuses its own {message:?}", subject.name));
        (message, accepted)
    };
    (0..POOL).map(fresh).collect()
}

pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

pub(crate) fn seed() -> u64 {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos() as u64;
    number("POSTBOX_SEED").unwrap_or_else(now)
}

#[test]
fn no_mutation_is_accepted() {
    let (seed, mutations) = (seed(), number("POSTBOX_TEST_MUTATIONS").unwrap_or(MUTATIONS));
    println!("replay with POSTBOX_SEED={seed} POSTBOX_TEST_MUTATIONS={mutations}");
    let start = Instant::now();
    let tally = hunt(&subjects(), mutations, seed);
    println!("{} mutations in {:?}: {} the same message in other bytes", tally.tried, start.elapsed(), tally.respelt);
    assert!(tally.forged.is_empty(), "POSTBOX_SEED={seed}: accepted {:?}", tally.forged);
    assert_eq!(tally.tried, mutations);
}

/// Receivers with one small flaw each, as seen in the wild. If the search above missed one of them,
/// it would prove nothing.
#[test]
fn the_search_finds_receivers_that_overlook_one_byte() {
    type Flaw = fn(Kit, &mut Message);
    let flaws: [(&str, Kit, Flaw); 7] = [
        ("takes upper-case hex", Kit::GitHub, |_, message| message.fields[0].1.make_ascii_lowercase()),
        ("trims", Kit::Shopify, |_, message| message.fields[0].1 = message.fields[0].1.trim_ascii().to_vec()),
        ("overlooks the time", Kit::Slack, |_, message| message.fields[0].1 = TIME.to_string().into_bytes()),
        ("overlooks the id", Kit::Standard, |_, message| message.fields[0].1 = crate::senders::ID.into()),
        ("overlooks the query", Kit::TwilioJson, |kit, message| {
            message.query = kit.genuine(SECRET, TIME, &message.body).query;
        }),
        ("overlooks the last byte of the code", Kit::Plain, |kit, message| {
            let right = kit.genuine(SECRET, TIME, &message.body).fields[0].1.clone();
            if message.fields[0].1.len() == right.len() {
                message.fields[0].1[63] = right[63];
            }
        }),
        ("compares as many bytes as it was given", Kit::Stripe, |kit, message| {
            let right = kit.genuine(SECRET, TIME, &message.body).fields[0].1.clone();
            if message.fields[0].1.len() > 20 && right.starts_with(&message.fields[0].1) {
                message.fields[0].1 = right;
            }
        }),
    ];
    for (name, kit, flaw) in flaws {
        let verifier = kit.verifier();
        let mut flawed = subject(kit, kit.verifier());
        flawed.receive = Box::new(move |message| {
            let mut message = message.clone();
            flaw(kit, &mut message);
            message.verify(&*verifier, TIME).ok().map(|it| format!("{it:?}"))
        });
        let tally = hunt(&[flawed], 50_000, 1);
        assert!(!tally.forged.is_empty(), "a receiver that {name} was not noticed");
    }
    // Sender and receiver both ignore the body's last byte.
    let cut = |message: &Message| {
        let mut cut = message.clone();
        cut.body.pop();
        cut
    };
    let deaf = Subject {
        name: "deaf".into(),
        by_meaning: false,
        send: Box::new(|random| {
            let mut message = Kit::GitHub.genuine(SECRET, TIME, &body(Kit::GitHub, random));
            message.body.push(b'}');
            message
        }),
        receive: Box::new(move |message| {
            cut(message).verify(&*Kit::GitHub.verifier(), TIME).ok().map(|_| String::new())
        }),
    };
    assert!(!hunt(&[deaf], 50_000, 1).forged.is_empty(), "a receiver that leaves out the last byte was not noticed");
}
