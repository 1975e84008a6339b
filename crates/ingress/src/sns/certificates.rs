//! AWS signing certificates: fetched once, cached by URL. Decides which fetch goes first when
//! strangers name thousands of certificates that do not exist.
//!
//! A message can be verified only with its certificate, and anybody may name one. Five rules keep
//! forgers from blocking genuine senders:
//!
//! - The number of fetches per second is limited. A certificate that several messages wait for is
//!   fetched once.
//! - The certificate named most often lately comes first; among equals, the one named last. A
//!   genuine sender names the same one in all its messages and repetitions. A forger can do that
//!   too, but a fetch uses it up: a URL that AWS does not have is not fetched again for a minute,
//!   and its count starts again at zero. So with F forgeries a second, a genuine sender whose
//!   certificate was named F / [`FETCHES_PER_SECOND`] times cannot be delayed by forgers who began
//!   when it did. Forgers who prepared for longer can delay it until their prepared names are used
//!   up, minutes at most.
//! - A message whose certificate ranks too low is refused at once and not kept waiting. Its URL is
//!   counted all the same. Few messages wait for one fetch, so forgers hold few connections.
//! - A certificate that has verified a message is never evicted for one that has not.
//! - Warnings about all this are rate limited.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::BuildHasher as _;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use postbox_core::{Bucket, Clock, Rate, lock};
use postbox_http::Fetched;
use postbox_receiver::LogThrottle;
use postbox_webhook::sns::{Certificate, CertificateUrl};
use tokio::sync::oneshot;
use tracing::warn;

use super::{FETCH_TIMEOUT, Fetch};
use crate::answer::Answer;

/// Most cached certificates, of all sources and stores. AWS uses one per region, some 40, and
/// changes it about once a year.
const CERTIFICATES_MAX: usize = 128;
/// Most requests per second to AWS that strangers can cause: fewer than the forgeries that cause
/// them, and negligible for AWS.
pub(crate) const FETCHES_PER_SECOND: u32 = 50;
/// Burst of fetches.
const FETCH_BURST: Duration = Duration::from_millis(200);
/// Most concurrent fetches. At a fifth of a second each, 16 are enough to use the rate.
pub(crate) const FETCHES_MAX: usize = 16;
/// Most messages that wait for a fetch to begin, and most that wait for the fetches under way: each
/// a quarter of the connections a server usually allows. With fewer connections, the limit is a
/// quarter of those.
pub(super) const ASKERS_MAX: usize = 128;
/// How long a URL without a certificate is not fetched again.
const REFUSED_FOR: Duration = Duration::from_secs(60);
/// Most URLs whose requests are counted: 160 s of 200 forgeries a second, in 4 MiB.
const COUNTS_MAX: usize = 32 * 1024;
/// The count of a URL that nobody names for this long starts again at zero. SNS repeats after 20 s
/// by default.
const COUNTED_FOR: Duration = Duration::from_secs(120);

/// The certificates of all SNS sources of a process.
pub(crate) struct Certificates {
    pub(super) fetch: Arc<dyn Fetch>,
    state: Mutex<State>,
}

struct State {
    known: BTreeMap<String, Known>,
    /// When each refused URL may be fetched again.
    refused: HashMap<String, Duration>,
    counts: RequestCounts,
    waiting: BTreeMap<String, Waiting>,
    bucket: Bucket,
    fetchers: usize,
    /// At most [`ASKERS_MAX`].
    askers_max: usize,
    failures: LogThrottle,
}

struct Known {
    certificate: Certificate,
    /// Whether it has verified a message.
    proven: bool,
}

/// The result of fetching one certificate.
type Found = Result<Certificate, Answer>;

/// A certificate that messages wait for.
struct Waiting {
    url: CertificateUrl,
    rank: Rank,
    askers: Vec<oneshot::Sender<Found>>,
    fetching: bool,
}

/// How often it was named lately; then when last, as the running number of that request.
type Rank = (u32, u64);

impl Certificates {
    pub(crate) fn new(fetch: Arc<dyn Fetch>, askers_max: usize) -> Arc<Self> {
        let rate = Rate::per_second(FETCHES_PER_SECOND).expect("a positive number a second is a rate");
        let state = State {
            known: BTreeMap::new(),
            refused: HashMap::new(),
            counts: RequestCounts::default(),
            waiting: BTreeMap::new(),
            bucket: Bucket::new(rate, FETCH_BURST),
            fetchers: 0,
            askers_max,
            failures: LogThrottle::default(),
        };
        Arc::new(Self { fetch, state: Mutex::new(state) })
    }

    /// Returns the certificate at `url`. Cancel-safe: dropping this future only gives up its place.
    pub(crate) async fn get(self: &Arc<Self>, url: &CertificateUrl, clock: &Arc<dyn Clock>) -> Found {
        let (asker, found) = oneshot::channel();
        let starts = {
            let mut state = self.state();
            if let Some(known) = state.known.get(url.as_str()) {
                return Ok(known.certificate.clone());
            }
            state.ask(url, asker, clock.monotonic())?;
            (state.fetchers < FETCHES_MAX && state.best().is_some()).then(|| {
                state.fetchers += 1;
                Fetcher { certificates: Arc::clone(self), url: None, retired: false }
            })
        };
        if let Some(fetcher) = starts {
            tokio::spawn(fetcher.run(Arc::clone(clock)));
        }
        tokio::select! {
            // Dropped without an answer: evicted from the queue by others.
            found = found => found.unwrap_or(Err(Answer::CertificateUnavailable)),
            () = clock.sleep(FETCH_TIMEOUT) => Err(Answer::CertificateUnavailable),
        }
    }

    /// Marks a certificate as having verified a message.
    pub(crate) fn mark_proven(&self, url: &CertificateUrl) {
        if let Some(known) = self.state().known.get_mut(url.as_str()) {
            known.proven = true;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Answers everyone who waits for `url`, and caches the result.
    fn settle(&self, url: &str, fetched: Fetched, now: Duration) {
        let mut state = self.state();
        let Some(waiting) = state.waiting.remove(url) else { return };
        // The fetch uses up the count, whatever its result.
        state.counts.forget(url);
        let found = match fetched {
            Fetched::Body(pem) => Certificate::from_pem(&waiting.url, &pem).map_err(|error| (error.to_string(), true)),
            // Most likely AWS has no such certificate, and the message is forged. But a firewall
            // may have answered, and SNS does not repeat what gets 4xx.
            Fetched::Refused(why) => Err((why, true)),
            Fetched::Failed(why) => Err((why, false)),
        };
        let unavailable = Answer::CertificateUnavailable;
        let found = match found {
            Ok(certificate) => {
                state.keep(url, certificate.clone());
                Ok(certificate)
            }
            Err((why, is_refused)) => {
                if is_refused {
                    state.refuse(url, now);
                }
                if let Some(times) = state.failures.observe(now) {
                    warn!(url, code = unavailable.code(), why, times, "failed to fetch SNS signing certificate");
                }
                Err(unavailable)
            }
        };
        drop(state);
        for asker in waiting.askers {
            // The asker may be gone.
            let _ = asker.send(found.clone());
        }
    }
}

impl State {
    /// Queues an asker, perhaps evicting others. Fails at once if there is no place.
    fn ask(&mut self, url: &CertificateUrl, asker: oneshot::Sender<Found>, now: Duration) -> Result<(), Answer> {
        match self.refused.get(url.as_str()) {
            Some(until) if now < *until => return Err(Answer::CertificateUnavailable),
            _ => {}
        }
        let rank = self.counts.add(url.as_str(), now);
        let is_fetched = self.waiting.get_mut(url.as_str()).map(|waiting| {
            waiting.rank = rank;
            waiting.askers.retain(|asker| !asker.is_closed());
            waiting.fetching
        });
        // A certificate that is being fetched does not count as queued: its askers take no place
        // from others.
        let has_place = match is_fetched {
            Some(true) => self.askers(true) < self.askers_max,
            _ => self.make_room(url, rank),
        };
        if !has_place {
            return Err(Answer::CertificateUnavailable);
        }
        let waiting = self.waiting.entry(url.as_str().to_owned()).or_insert_with(|| Waiting {
            url: url.clone(),
            rank,
            askers: Vec::new(),
            fetching: false,
        });
        waiting.askers.push(asker);
        Ok(())
    }

    /// Evicts lower-ranked askers until the queue has a place; `false` if it cannot.
    fn make_room(&mut self, url: &CertificateUrl, rank: Rank) -> bool {
        self.waiting.retain(|_, waiting| {
            waiting.fetching || waiting.url == *url || waiting.askers.iter().any(|asker| !asker.is_closed())
        });
        while self.askers(false) >= self.askers_max {
            let others = self.waiting.values().filter(|waiting| !waiting.fetching && waiting.url != *url);
            let Some(last) = others.min_by_key(|waiting| waiting.rank).filter(|waiting| waiting.rank < rank) else {
                return false;
            };
            let last = last.url.as_str().to_owned();
            self.waiting.remove(&last);
        }
        true
    }

    /// Returns how many messages wait for fetches under way, or for fetches to begin.
    fn askers(&self, fetching: bool) -> usize {
        self.waiting.values().filter(|waiting| waiting.fetching == fetching).map(|waiting| waiting.askers.len()).sum()
    }

    /// Returns the certificate to fetch next.
    fn best(&self) -> Option<&Waiting> {
        let wanted = |waiting: &&Waiting| !waiting.fetching && waiting.askers.iter().any(|asker| !asker.is_closed());
        self.waiting.values().filter(wanted).max_by_key(|waiting| waiting.rank)
    }

    /// Caches a certificate, unless all cached ones have verified a message: then it answers only
    /// those who wait for it.
    fn keep(&mut self, url: &str, certificate: Certificate) {
        if self.known.len() >= CERTIFICATES_MAX {
            // The unproven one that expires first. If it is still in use it is fetched again.
            let unproven = self.known.iter().filter(|(_, known)| !known.proven);
            let first = unproven.min_by_key(|(_, known)| known.certificate.validity().1.0);
            let Some(url) = first.map(|(url, _)| url.clone()) else { return };
            self.known.remove(&url);
        }
        self.known.insert(url.to_owned(), Known { certificate, proven: false });
    }

    /// Remembers a refused URL. Expired entries are removed at twice the number that the fetch rate
    /// allows in [`REFUSED_FOR`].
    fn refuse(&mut self, url: &str, now: Duration) {
        let most = 2 * FETCHES_PER_SECOND as usize * REFUSED_FOR.as_secs() as usize;
        if self.refused.len() >= most {
            self.refused.retain(|_, until| now < *until);
        }
        self.refused.insert(url.to_owned(), now + REFUSED_FOR);
    }
}

/// A running fetcher; there are at most [`FETCHES_MAX`].
struct Fetcher {
    certificates: Arc<Certificates>,
    url: Option<String>,
    retired: bool,
}

/// What a fetcher does next.
enum Next {
    Fetch(String),
    Wait(Duration),
    Retire,
}

impl Fetcher {
    /// Fetches until nobody waits.
    async fn run(mut self, clock: Arc<dyn Clock>) {
        loop {
            match self.next(clock.monotonic()) {
                Next::Retire => return,
                Next::Wait(time) => clock.sleep(time).await,
                Next::Fetch(url) => {
                    let fetched = tokio::select! {
                        fetched = self.certificates.fetch.get(url.clone()) => fetched,
                        () = clock.sleep(FETCH_TIMEOUT) => Fetched::Failed("no answer in time".into()),
                    };
                    self.certificates.settle(&url, fetched, clock.monotonic());
                    self.url = None;
                }
            }
        }
    }

    fn next(&mut self, now: Duration) -> Next {
        let mut state = self.certificates.state();
        let Some(url) = state.best().map(|waiting| waiting.url.as_str().to_owned()) else {
            // Under the same lock, so that the next asker sees the free place and starts a fetcher.
            state.fetchers -= 1;
            self.retired = true;
            return Next::Retire;
        };
        if let Err(wait) = state.bucket.take(now) {
            return Next::Wait(wait);
        }
        let places = state.askers_max.saturating_sub(state.askers(true));
        if let Some(waiting) = state.waiting.get_mut(&url) {
            waiting.fetching = true;
            // The senders of the other messages repeat them, and find the certificate here.
            waiting.askers.truncate(places);
        }
        self.url = Some(url.clone());
        Next::Fetch(url)
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        // After a panic, or when the runtime has ended: the askers are answered, and the next asker
        // starts a new fetcher.
        if !self.retired {
            let mut state = self.certificates.state();
            state.fetchers -= 1;
            if let Some(url) = &self.url {
                state.waiting.remove(url);
            }
        }
    }
}

/// How often URLs were named lately. When full, the least often and longest ago named is forgotten.
#[derive(Default)]
struct RequestCounts {
    hasher: RandomState,
    by_url: HashMap<u64, (Rank, Duration)>,
    by_rank: BTreeSet<(Rank, u64)>,
    arrivals: u64,
}

impl RequestCounts {
    /// Counts one more request and returns the new rank.
    fn add(&mut self, url: &str, now: Duration) -> Rank {
        let hash = self.hasher.hash_one(url);
        let before = self.by_url.get(&hash).copied();
        let times = match before {
            Some(((times, _), at)) if now.saturating_sub(at) < COUNTED_FOR => times,
            _ => 0,
        };
        if let Some((rank, _)) = before {
            self.by_rank.remove(&(rank, hash));
        } else if self.by_url.len() >= COUNTS_MAX
            && let Some((_, first)) = self.by_rank.pop_first()
        {
            self.by_url.remove(&first);
        }
        self.arrivals += 1;
        let rank = (times.saturating_add(1), self.arrivals);
        self.by_url.insert(hash, (rank, now));
        self.by_rank.insert((rank, hash));
        rank
    }

    fn forget(&mut self, url: &str) {
        let hash = self.hasher.hash_one(url);
        if let Some((rank, _)) = self.by_url.remove(&hash) {
            self.by_rank.remove(&(rank, hash));
        }
    }
}
