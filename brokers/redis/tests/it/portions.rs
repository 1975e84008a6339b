//! How many entries a source requests at once.

use postbox_core::Source as _;

use super::support::Broker;
use super::{SERVERS, source_with};

/// The server answers with whole entries, so only a few large ones are requested at once.
#[tokio::test]
async fn large_entries_are_asked_for_by_their_size() {
    const ENTRIES: usize = 48;
    const MIB: usize = 1024 * 1024;
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let mut connection = broker.connection().await;
        let payload = vec![b'x'; MIB];
        for _ in 0..ENTRIES {
            let mut add = redis::cmd("XADD");
            let add = add.arg("events").arg("*").arg("topic").arg("t").arg("payload").arg(&payload);
            let _: String = add.query_async(&mut connection).await.expect("added");
        }
        let source = source_with(&broker, |_| ());
        let mut portions = Vec::new();
        while portions.iter().sum::<usize>() < ENTRIES {
            portions.push(source.next(512).await.expect("read").len());
        }
        assert!(portions[0] <= 32 && portions[1..].iter().all(|count| *count <= 8), "{portions:?}");
    }
}
