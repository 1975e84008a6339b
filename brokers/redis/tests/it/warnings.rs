//! Warnings about a server that may lose accepted entries.

use postbox_testkit::warnings::Warnings;

use super::support::Broker;
use super::{SERVERS, codes, deliver, numbered, sink};

#[tokio::test]
async fn a_server_that_may_lose_streams_is_named_once() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let (warnings, _guard) = Warnings::hear();
        assert_eq!(codes(&deliver(&sink(&broker), &numbered(1)).await), ["delivered"]);
        assert_eq!(warnings.all(), Vec::<String>::new(), "noeviction and an append-only file");
        let () = broker.ask("CONFIG SET maxmemory-policy allkeys-lru").await;
        let () = broker.ask("CONFIG SET appendonly no").await;
        let sink = sink(&broker);
        for _ in 0..2 {
            assert_eq!(codes(&deliver(&sink, &numbered(1)).await), ["delivered"]);
            broker.proxy.reset();
            broker.settle(|| !sink.is_connected()).await;
        }
        let all = warnings.all();
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[0].contains("may evict") && all[1].contains("keeps nothing on disk"), "{all:?}");
    }
}
