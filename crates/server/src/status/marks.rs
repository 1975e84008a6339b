//! Where the destinations' streams end: `/high-water-marks`, `stats --json` and `/metrics`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use postbox_core::{Error, ErrorKind, HighWaterMark, HighWaterMarks, Result, SubscriptionName};
use postbox_engine::SupervisedRelay;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

/// Longest wait for the destinations. They are asked concurrently, and one that is down must not
/// delay the answer.
const MARKS_WAIT: Duration = Duration::from_secs(2);
/// Most streams listed per destination: names that contain a key are unbounded.
const STREAMS_MAX: usize = 30;

/// The high-water marks of one subscription's destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarksJson {
    /// The subscription.
    pub subscription: SubscriptionName,
    /// One for each existing stream, by name.
    pub high_water_marks: Vec<HighWaterMark>,
    /// Why they are not known.
    pub fault: Option<String>,
}

/// The marks of each destination that can report them, for this stream or for every stream that
/// events may be in. A subscription that several stores have is one destination and asked once.
pub(crate) async fn marks(relays: &[Arc<SupervisedRelay>], stream: Option<&str>) -> Vec<MarksJson> {
    let mut known = BTreeSet::new();
    let asked = relays.iter().filter(|relay| known.insert(relay.name())).filter_map(|relay| {
        let destination = relay.relay().sink()?.high_water_marks()?;
        Some(async move {
            let answer = timeout(MARKS_WAIT, ask(destination, stream)).await.unwrap_or_else(|_| Err(too_slow()));
            let fault = answer.as_ref().err().map(|error| format!("{}: {}", error.code(), error.message()));
            let high_water_marks = answer.unwrap_or_default();
            MarksJson { subscription: relay.name().clone(), high_water_marks, fault }
        })
    });
    join_all(asked).await
}

async fn ask(destination: &dyn HighWaterMarks, stream: Option<&str>) -> Result<Vec<HighWaterMark>> {
    let mut streams = match stream {
        Some(stream) => vec![stream.to_owned()],
        None => destination.streams(STREAMS_MAX).await?,
    };
    streams.sort();
    let mark = |stream: String| async move {
        let position = destination.high_water_mark(&stream).await?;
        Ok::<_, Error>(position.map(|position| HighWaterMark { stream, position }))
    };
    Ok(try_join_all(streams.into_iter().map(mark)).await?.into_iter().flatten().collect())
}

fn too_slow() -> Error {
    let text = format!("the destination did not answer within {MARKS_WAIT:?}");
    Error::new(ErrorKind::Unavailable, "inspect", "marks_timeout", text)
}
