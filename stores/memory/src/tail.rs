//! Watching a log as it grows, by the numbers of its commits.

use async_trait::async_trait;
use postbox_core::kit::BatchLimiter;
use postbox_core::{BatchLimit, Criteria, LogName, Result, Seq, Tail, Tailed, place_invalid};

use crate::MemoryStore;

#[async_trait]
impl Tail for MemoryStore {
    async fn tail(&self, log: &LogName, which: &Criteria, place: Option<&str>, limit: BatchLimit) -> Result<Tailed> {
        let state = self.server.state("tail")?;
        let log = state.data.log("tail", log)?;
        let Some(place) = place else {
            let place = format!("{}/{}", log.commit_last, i64::MAX);
            return Ok(Tailed { events: Vec::new(), place, more: false });
        };
        let parsed = place.split_once('/').and_then(|(commit, seq)| Some((commit.parse().ok()?, seq.parse().ok()?)));
        let (commit, seq): (u64, i64) = parsed.ok_or_else(|| place_invalid(place))?;
        let mut since: Vec<_> = log.committed().filter(|(at, by, _)| (*by, *at) > (commit, seq)).collect();
        since.sort_by_key(|(at, by, _)| (*by, *at));
        let mut tailed = Tailed { events: Vec::new(), place: place.to_owned(), more: false };
        let mut limiter = BatchLimiter::new(limit);
        for (seq, commit, event) in since {
            if which.mean_event(Some(event)) {
                if !limiter.take(event.payload.len()) {
                    tailed.more = true;
                    break;
                }
                tailed.events.push((Seq(seq), event.clone()));
            }
            tailed.place = format!("{commit}/{seq}");
        }
        Ok(tailed)
    }
}
