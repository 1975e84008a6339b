//! Certificates of AWS: fetched once, kept by URL; and who goes first when strangers name thousands
//! that do not exist.
//!
//! Whether a message is genuine is only known once its certificate is there, and anybody may name
//! one. Five rules keep forgers from keeping the genuine ones out:
//!
//! - So many fetches a second, and no more; what is asked for by many is fetched once.
//! - First comes the certificate that was named most often lately, and of equals the one named
//!   last. A genuine sender names the same one in all of its messages and repetitions. A forger can
//!   do that too, but each fetch of his is spent: what AWS does not have is not asked for again for
//!   a minute, and begins at nothing then. So with F forgeries a second nobody who has named his
//!   certificate F / [`FETCHES_PER_SECOND`] times can be kept waiting by forgers who began when he
//!   did; those who have prepared for long can delay him for as long as their provisions last,
//!   minutes at most.
//! - Whoever is behind is sent away at once rather than kept: forgers hold no connections. That he
//!   came is remembered.
//! - A certificate that has verified a message is never given up for one that has not.
//! - Warnings about all this are rate limited.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::BuildHasher as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use postbox_core::{Bucket, Clock, Rate};
use postbox_engine::LogThrottle;
use postbox_http::Fetched;
use postbox_webhook::Refusal;
use postbox_webhook::sns::{Certificate, CertificateUrl};
use tokio::sync::oneshot;
use tracing::warn;

use super::{FETCH_TIMEOUT, Fetch};
use crate::answer::Answer;

/// Most certificates kept. AWS uses one per region and changes it about once a year.
const CERTIFICATES_MAX: usize = 16;
/// Most requests to AWS that strangers can cause: fewer than the forgeries that cause them, and
/// nothing to a service of that size.
pub(crate) const FETCHES_PER_SECOND: u32 = 50;
/// What of them may come at once.
const FETCH_BURST: Duration = Duration::from_millis(200);
/// Most requests to AWS at one time: at a fifth of a second each they make use of the rate, and no
/// more.
pub(crate) const FETCHES_MAX: usize = 16;
/// Most messages that wait for certificates: a quarter of the connections that a server commonly
/// has.
const ASKERS_MAX: usize = 128;
/// How long what AWS does not have is not asked for again.
const REFUSED_FOR: Duration = Duration::from_secs(60);
/// Most URLs of which it is known how often they were named: 160 s of 200 forgeries a second, in 4
/// MiB.
const COUNTS_MAX: usize = 32 * 1024;
/// A URL that nobody names for so long begins at nothing. SNS repeats after 20 s if nothing else is
/// set.
const COUNTED_FOR: Duration = Duration::from_secs(120);

/// All of one source.
pub(crate) struct Certificates {
    fetch: Arc<dyn Fetch>,
    state: Mutex<State>,
}

struct State {
    known: BTreeMap<String, Known>,
    /// Until when.
    refused: HashMap<String, Duration>,
    counts: RequestCounts,
    waiting: BTreeMap<String, Waiting>,
    bucket: Bucket,
    fetchers: usize,
    failures: LogThrottle,
}

struct Known {
    certificate: Certificate,
    /// It has verified a message.
    proven: bool,
}

/// What one certificate's fetch will tell.
type Found = Result<Certificate, Answer>;

/// A certificate that is asked for.
struct Waiting {
    url: CertificateUrl,
    rank: Rank,
    askers: Vec<oneshot::Sender<Found>>,
    fetching: bool,
}

/// How often it was named lately, and when last, by a count of all that came.
type Rank = (u32, u64);

impl Certificates {
    pub(crate) fn new(fetch: Arc<dyn Fetch>) -> Arc<Self> {
        let rate = Rate::per_second(FETCHES_PER_SECOND).expect("a positive number a second is a rate");
        let state = State {
            known: BTreeMap::new(),
            refused: HashMap::new(),
            counts: RequestCounts::default(),
            waiting: BTreeMap::new(),
            bucket: Bucket::new(rate, FETCH_BURST),
            fetchers: 0,
            failures: LogThrottle::default(),
        };
        Arc::new(Self { fetch, state: Mutex::new(state) })
    }

    /// The certificate at `url`. Dropped, nobody waits for it any more.
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
            // Without an answer: made way for others.
            found = found => found.unwrap_or(Err(Answer::CertificateUnavailable)),
            () = clock.sleep(FETCH_TIMEOUT) => Err(Answer::CertificateUnavailable),
        }
    }

    /// It has verified a message.
    pub(crate) fn mark_proven(&self, url: &CertificateUrl) {
        if let Some(known) = self.state().known.get_mut(url.as_str()) {
            known.proven = true;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whoever asked, and remembers.
    fn settle(&self, url: &str, fetched: Fetched, now: Duration) {
        let mut state = self.state();
        let Some(waiting) = state.waiting.remove(url) else { return };
        // Spent, whatever came of it.
        state.counts.forget(url);
        let (found, why) = match fetched {
            Fetched::Body(pem) => match Certificate::from_pem(&waiting.url, &pem) {
                Ok(certificate) => (Ok(certificate), String::new()),
                Err(error) => (Err(Answer::Refused(Refusal::CertificateUrlRefused)), error.to_string()),
            },
            // AWS has no such certificate: the message is made up.
            Fetched::Refused(why) => (Err(Answer::Refused(Refusal::CertificateUrlRefused)), why),
            Fetched::Failed(why) => (Err(Answer::CertificateUnavailable), why),
        };
        match &found {
            Ok(certificate) => state.keep(url, certificate.clone()),
            Err(answer) => {
                if matches!(answer, Answer::Refused(_)) {
                    state.refuse(url, now);
                }
                if let Some(times) = state.failures.observe(now) {
                    let code = answer.code();
                    warn!(url, code, why, times, "failed to fetch SNS signing certificate");
                }
            }
        }
        drop(state);
        for asker in waiting.askers {
            // Nobody may listen any more.
            let _ = asker.send(found.clone());
        }
    }
}

impl State {
    /// Puts an asker in the queue, which may cost another its place; or says at once that there is
    /// none.
    fn ask(&mut self, url: &CertificateUrl, asker: oneshot::Sender<Found>, now: Duration) -> Result<(), Answer> {
        match self.refused.get(url.as_str()) {
            Some(until) if now < *until => return Err(Answer::Refused(Refusal::CertificateUrlRefused)),
            _ => {}
        }
        let rank = self.counts.add(url.as_str(), now);
        let its = self.waiting.get_mut(url.as_str()).map(|waiting| {
            waiting.rank = rank;
            waiting.askers.retain(|asker| !asker.is_closed());
            waiting.askers.len()
        });
        // What is being fetched is out of the queue: however many ask for it, they keep nobody from
        // waiting.
        if its.is_some_and(|askers| askers >= ASKERS_MAX) || !self.make_room(url, rank) {
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

    /// Sends those away who are behind until there is a place in the queue; `false` if nobody is.
    fn make_room(&mut self, url: &CertificateUrl, rank: Rank) -> bool {
        self.waiting.retain(|_, waiting| {
            waiting.fetching || waiting.url == *url || waiting.askers.iter().any(|asker| !asker.is_closed())
        });
        let queued = |state: &Self| -> usize {
            state.waiting.values().filter(|waiting| !waiting.fetching).map(|waiting| waiting.askers.len()).sum()
        };
        while queued(self) >= ASKERS_MAX {
            let others = self.waiting.values().filter(|waiting| !waiting.fetching && waiting.url != *url);
            let Some(last) = others.min_by_key(|waiting| waiting.rank).filter(|waiting| waiting.rank < rank) else {
                return false;
            };
            let last = last.url.as_str().to_owned();
            self.waiting.remove(&last);
        }
        true
    }

    /// What is fetched next.
    fn best(&self) -> Option<&Waiting> {
        let wanted = |waiting: &&Waiting| !waiting.fetching && waiting.askers.iter().any(|asker| !asker.is_closed());
        self.waiting.values().filter(wanted).max_by_key(|waiting| waiting.rank)
    }

    fn keep(&mut self, url: &str, certificate: Certificate) {
        if self.known.len() >= CERTIFICATES_MAX {
            // One that nobody needed yet, else the one that ends first; it is fetched again if it
            // is still in use.
            let first = self.known.iter().min_by_key(|(_, known)| (known.proven, known.certificate.validity().1.0));
            if let Some(url) = first.map(|(url, _)| url.clone()) {
                self.known.remove(&url);
            }
        }
        self.known.insert(url.to_owned(), Known { certificate, proven: false });
    }

    /// There are as many as were fetched in the time, at most, and as many again.
    fn refuse(&mut self, url: &str, now: Duration) {
        let most = 2 * FETCHES_PER_SECOND as usize * REFUSED_FOR.as_secs() as usize;
        if self.refused.len() >= most {
            self.refused.retain(|_, until| now < *until);
        }
        self.refused.insert(url.to_owned(), now + REFUSED_FOR);
    }
}

/// A place among the fetches under way.
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
            // Under the same lock: whoever comes next finds the place free.
            state.fetchers -= 1;
            self.retired = true;
            return Next::Retire;
        };
        if let Err(wait) = state.bucket.take(now) {
            return Next::Wait(wait);
        }
        if let Some(waiting) = state.waiting.get_mut(&url) {
            waiting.fetching = true;
        }
        self.url = Some(url.clone());
        Next::Fetch(url)
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        // A panic, or its runtime has ended: whoever asked hears that there is none, and the next
        // begins anew.
        if !self.retired {
            let mut state = self.certificates.state();
            state.fetchers -= 1;
            if let Some(url) = &self.url {
                state.waiting.remove(url);
            }
        }
    }
}

/// How often URLs were named lately. The least and longest ago named are forgotten first.
#[derive(Default)]
struct RequestCounts {
    hasher: RandomState,
    by_url: HashMap<u64, (Rank, Duration)>,
    by_rank: BTreeSet<(Rank, u64)>,
    arrivals: u64,
}

impl RequestCounts {
    /// One more time.
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
