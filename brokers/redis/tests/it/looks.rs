//! `check-config --connect` reports what exists, and creates nothing.

use postbox_config::{SinkConfig as _, SourceConfig as _};
use postbox_redis::{RedisSinkConfig, RedisSourceConfig};
use postbox_testkit::receiving::source_context;
use postbox_testkit::sending::context;

use super::support::Broker;
use super::{PATIENCE, SERVERS};

#[tokio::test]
async fn a_look_connects_and_makes_nothing() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let look = async |url: String| {
            let stream = "events".parse().expect("a template");
            let sink = RedisSinkConfig { url: url.clone(), stream, ..RedisSinkConfig::default() };
            let source = RedisSourceConfig { url, stream: "events".into(), ..RedisSourceConfig::default() };
            let answers = [sink.connect(&context(PATIENCE)).await, source.connect(&source_context()).await];
            answers.map(|answer| answer.map_err(|error| error.code().to_owned()))
        };
        let expected = "answers; the stream events is empty or not there yet";
        assert_eq!(look(broker.url()).await, [Ok(expected.to_owned()), Ok(expected.to_owned())]);
        assert_eq!(broker.ask::<usize>("DBSIZE").await, 0, "nothing was made");
        let made_by_others = RedisSinkConfig {
            url: broker.url(),
            stream: "events".parse().expect("a template"),
            make_stream: false,
            ..RedisSinkConfig::default()
        };
        let answer = made_by_others.connect(&context(PATIENCE)).await.map_err(|error| error.code().to_owned());
        assert_eq!(answer, Err("redis_stream_missing".to_owned()));
        let _: String = broker.ask("XADD events * payload 1").await;
        let _: usize = broker.ask("XTRIM events MAXLEN 0").await;
        let answer = made_by_others.connect(&context(PATIENCE)).await;
        assert!(answer.is_ok(), "it is there, and empty: {answer:?}");
        let _: String = broker.ask("XADD events * payload 1").await;
        assert_eq!(look(broker.url()).await.map(|it| it.is_ok_and(|it| it.ends_with("is there"))), [true; 2]);
        let _: usize = broker.ask("DEL events").await;
        let () = broker.ask("SET events text").await;
        assert_eq!(look(broker.url()).await, ["redis_wrong_type"; 2].map(|code| Err(code.to_owned())));
        assert_eq!(
            look("redis://127.0.0.1:1".into()).await,
            ["redis_connect_failed"; 2].map(|code| Err(code.to_owned()))
        );
        let () = broker.ask("CONFIG SET requirepass secret").await;
        assert_eq!(look(broker.url()).await, ["redis_unauthorized"; 2].map(|code| Err(code.to_owned())));
    }
}
