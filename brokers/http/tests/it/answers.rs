//! Every way in which a target can answer, or fail to.

use std::iter::repeat;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::StatusCode;
use postbox_core::{Outcome, Sink};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_testkit::clock::ManualClock;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::stand::{
    DEADLINE, StillClock, Target, config, nobody, plain, raw_target, send, short, sink, text, this_machine,
    write_for_ever,
};

/// Returns the status that the path names.
fn status_of(path: &str) -> StatusCode {
    path.trim_start_matches('/').parse().unwrap()
}

#[tokio::test]
async fn every_status_has_its_outcome() {
    let (_, url) =
        Target::start(|seen| Response::builder().status(status_of(&seen.path)).body(Body::from("because")).unwrap())
            .await;
    for (status, expected) in [
        (200, ("delivered", "")),
        (201, ("delivered", "")),
        (202, ("delivered", "")),
        (204, ("delivered", "")),
        (301, ("dead", "http_redirect")),
        (302, ("dead", "http_redirect")),
        (303, ("dead", "http_redirect")),
        (304, ("dead", "http_redirect")),
        (307, ("dead", "http_redirect")),
        (308, ("dead", "http_redirect")),
        (400, ("dead", "http_400")),
        (401, ("dead", "http_401")),
        (403, ("dead", "http_403")),
        (404, ("dead", "http_404")),
        (405, ("dead", "http_405")),
        (408, ("retry", "http_408")),
        (409, ("duplicate", "")),
        (410, ("gone", "http_410")),
        (413, ("dead", "http_413")),
        (418, ("dead", "http_418")),
        (422, ("dead", "http_422")),
        (425, ("retry", "http_425")),
        (429, ("throttled", "http_429")),
        (431, ("dead", "http_431")),
        (500, ("server error", "http_500")),
        (501, ("server error", "http_501")),
        (502, ("ambiguous", "http_502")),
        (503, ("ambiguous", "http_503")),
        (504, ("ambiguous", "http_504")),
        (599, ("server error", "http_599")),
    ] {
        let outcome = send(&sink(config(format!("{url}/{status}"))), &plain(1)).await;
        assert_eq!(short(&outcome), expected, "{status}");
        if !outcome.is_delivered() && status != 304 {
            assert!(text(&outcome).contains("because"), "{outcome:?}");
        }
    }
}

#[tokio::test]
async fn a_503_is_ambiguous_whatever_others_met() {
    // Event 1 makes the handler answer 503.
    let (_, url) = Target::start(|seen| {
        let poison = seen.headers["webhook-id"].to_str().unwrap().ends_with("001");
        let status = if poison { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
        Response::builder().status(status).header("retry-after", "7").body(Body::empty()).unwrap()
    })
    .await;
    let sink = sink(config(&url));
    for number in [1, 1, 2, 1, 2, 2, 1] {
        let outcome = send(&sink, &plain(number)).await;
        let named = Some(Duration::from_secs(7));
        match number {
            1 => assert!(matches!(&outcome, Outcome::Ambiguous { after, .. } if *after == named), "{outcome:?}"),
            _ => assert!(outcome.is_delivered(), "{outcome:?}"),
        }
    }
}

#[tokio::test]
async fn a_named_wait_is_handed_on() {
    let (_, url) = Target::start(|seen| {
        let value = seen.path.trim_start_matches('/').replace('_', " ");
        Response::builder().status(429).header("retry-after", value).body(Body::empty()).unwrap()
    })
    .await;
    for (value, expected) in [
        ("120", Some(120)),
        ("Thu,_01_Jan_2026_00:01:00_GMT", Some(60)),
        ("Thu,_01_Jan_2020_00:00:00_GMT", None),
        ("soon", None),
    ] {
        let outcome = send(&sink(config(format!("{url}/{value}"))), &plain(1)).await;
        let Outcome::Throttled { after, .. } = outcome else { panic!("{outcome:?}") };
        // A date with a wrong weekday is invalid. A date in the past means no wait.
        assert_eq!(after.filter(|after| !after.is_zero()).map(|after| after.as_secs()), expected, "{value}");
    }
}

#[tokio::test]
async fn redirects_are_not_followed_and_named() {
    let (target, url) = Target::start(|seen| match seen.path.as_str() {
        "/from" => Response::builder().status(307).header("location", "/to\u{a0}").body(Body::empty()).unwrap(),
        "/away" => {
            let location = "https://example.org:8443/to?token=canary";
            Response::builder().status(308).header("location", location).body(Body::empty()).unwrap()
        }
        _ => Response::new(Body::empty()),
    })
    .await;
    let outcome = send(&sink(config(format!("{url}/from"))), &plain(1)).await;
    assert_eq!(short(&outcome), ("dead", "http_redirect"));
    let outcome = send(&sink(config(format!("{url}/away"))), &plain(1)).await;
    assert!(text(&outcome).contains("308 Permanent Redirect to https://example.org:8443/…; "), "{outcome:?}");
    assert_eq!(target.seen().len(), 2);
}

#[tokio::test]
async fn what_an_answer_repeats_of_our_secrets_is_not_kept() {
    let (_, url) = Target::start(|seen| {
        let (path, header) = (&seen.path, seen.headers["authorization"].to_str().unwrap());
        let body = format!("Cannot POST {path}?key=canary-query, key canary-query, authorization {header}, sorry");
        let location = format!("{path}/?key=canary-query");
        let status = if path.ends_with("-moved") { 308 } else { 404 };
        Response::builder().status(status).header("location", location).body(Body::from(body)).unwrap()
    })
    .await;
    for path in ["canary-path", "canary-path-moved"] {
        let config = HttpSinkConfig {
            headers: vec![("authorization".into(), "Bearer canary-header".into())],
            ..config(format!("{url}/{path}?key=canary-query"))
        };
        let outcome = send(&sink(config), &plain(1)).await;
        assert_eq!(short(&outcome).0, "dead");
        assert!(!text(&outcome).contains("canary"), "{outcome:?}");
        assert!(text(&outcome).contains("Cannot POST …, key …, authorization …, sorry"), "{outcome:?}");
    }
}

#[tokio::test]
async fn a_target_that_never_answers_is_ambiguous() {
    let (url, _) = raw_target(|stream| async move {
        let _kept_open = stream;
        std::future::pending().await
    })
    .await;
    let sink = sink(HttpSinkConfig { timeout: Duration::from_millis(200), ..config(url) });
    for number in [1, 1, 2] {
        assert_eq!(short(&send(&sink, &plain(number)).await), ("ambiguous", "timeout"));
    }
}

#[tokio::test]
async fn a_lost_connection_says_little() {
    let (url, _) = raw_target(|mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.1 20").await;
    })
    .await;
    let sink = sink(config(url));
    for number in [1, 1, 2] {
        assert_eq!(short(&send(&sink, &plain(number)).await), ("ambiguous", "connection_lost"));
    }
}

#[tokio::test]
async fn a_target_that_is_not_there_is_unavailable() {
    let (address, _nobody) = nobody();
    let outcome = send(&sink(config(format!("http://{address}"))), &plain(1)).await;
    assert_eq!(short(&outcome), ("unavailable", "connect_refused"));
    let outcome = send(&sink(config("http://no-such-host.invalid")), &plain(1)).await;
    assert_eq!(short(&outcome).0, "unavailable", "{outcome:?}");
}

#[tokio::test]
async fn a_slow_answer_body_does_not_hold_up_its_outcome() {
    for (status, expected) in [("200 OK", ("delivered", "")), ("500 Oh", ("server error", "http_500"))] {
        let (url, _) = raw_target(move |mut stream| async move {
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: 100000\r\n\r\nslow");
            let _ = stream.write_all(head.as_bytes()).await;
            std::future::pending().await
        })
        .await;
        // Without a limit, this call would wait for an hour.
        let outcome = send(&sink(config(url)), &plain(1)).await;
        assert_eq!(short(&outcome), expected);
        assert!(outcome.is_delivered() || text(&outcome).ends_with(": slow"), "{outcome:?}");
    }
}

#[tokio::test]
async fn endless_headers_and_bodies_end() {
    let (url, _) = raw_target(|mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n").await;
        write_for_ever(&mut stream, b"x-more: and-more-and-more-and-more\r\n").await;
    })
    .await;
    assert_eq!(short(&send(&sink(config(url)), &plain(1)).await).0, "ambiguous");
    let (url, _) = raw_target(|mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nx-long: ").await;
        write_for_ever(&mut stream, b"and-more-and-more-and-more").await;
    })
    .await;
    assert_eq!(short(&send(&sink(config(url)), &plain(1)).await).0, "ambiguous");
    let (url, _) = raw_target(|mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.1 400 No\r\n\r\n").await;
        write_for_ever(&mut stream, &[b'x'; 16 * 1024]).await;
    })
    .await;
    let outcome = send(&sink(config(url)), &plain(1)).await;
    assert_eq!(short(&outcome), ("dead", "http_400"));
    assert!(text(&outcome).len() < 600);
}

#[tokio::test]
async fn what_a_target_says_is_kept_short_and_harmless() {
    let (_, url) = Target::start(|_| {
        let body = format!("line\nbreak\x1b[2J\0{}", "é".repeat(10_000));
        Response::builder().status(422).body(Body::from(body)).unwrap()
    })
    .await;
    let outcome = send(&sink(config(url)), &plain(1)).await;
    assert!(text(&outcome).contains("line\\nbreak\\u{1b}[2J\\u{0}é"), "{outcome:?}");
    assert!(!text(&outcome).chars().any(char::is_control));
    assert!(text(&outcome).len() < 600);
}

#[tokio::test]
async fn one_connection_serves_many_requests() {
    let (url, connections) = raw_target(|stream| answer_all(stream, repeat(200))).await;
    let sink = sink(config(url));
    for number in 0..20 {
        assert!(send(&sink, &plain(number)).await.is_delivered());
    }
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

/// Answers the requests of a connection of which `raw_target` has read the first head, each with
/// the next status.
async fn answer_all(mut stream: TcpStream, statuses: impl Iterator<Item = u16>) {
    for status in statuses {
        let answer = format!("HTTP/1.1 {status} So\r\ncontent-length: 10000\r\n\r\n{}", "x".repeat(10_000));
        // The request's body has eight bytes.
        let mut body = [0; 8];
        if tokio::io::AsyncReadExt::read_exact(&mut stream, &mut body).await.is_err() {
            return;
        }
        let _ = stream.write_all(answer.as_bytes()).await;
        crate::stand::read_head(&mut stream).await;
    }
}

/// As behind a balancer of connections: each leads to one process for as long as it lives.
#[tokio::test]
async fn a_process_that_refuses_is_left_and_no_connection_is_kept_for_long() {
    let accepted = AtomicUsize::new(0);
    let (url, connections) = raw_target(move |stream| {
        let number = accepted.fetch_add(1, Ordering::SeqCst);
        answer_all(stream, repeat(*[503, 500, 429].get(number).unwrap_or(&200)))
    })
    .await;
    let clock = Arc::new(ManualClock::default());
    let sink = HttpSink::new(config(url), clock.clone()).unwrap();
    let second = Duration::from_secs(1);
    for (passed, code, connected) in [
        (Duration::ZERO, "http_503", 1),
        (second, "http_500", 2),
        (second, "http_429", 3),
        (second, "", 4),
        (299 * second, "", 4),
        (second, "", 5),
    ] {
        clock.advance(passed);
        assert_eq!(short(&send(&sink, &plain(1)).await).1, code);
        assert_eq!(connections.load(Ordering::SeqCst), connected, "{code}");
    }
}

/// A busy target that refuses now and then does not have to open connections for it.
#[tokio::test]
async fn a_process_that_also_accepts_keeps_its_connection_until_it_only_refuses() {
    let answers = || [200, 503, 429, 200].into_iter().chain(repeat(503));
    let (url, connections) = raw_target(move |stream| answer_all(stream, answers())).await;
    let clock = Arc::new(ManualClock::default());
    let sink = HttpSink::new(config(url), clock.clone()).unwrap();
    for (code, connected) in
        [("", 1), ("http_503", 1), ("http_429", 1), ("", 1), ("http_503", 1), ("http_503", 1), ("http_503", 1), ("", 2)]
    {
        assert_eq!(short(&send(&sink, &plain(1)).await).1, code);
        assert_eq!(connections.load(Ordering::SeqCst), connected, "{code}");
        clock.advance(Duration::from_secs(4));
    }
}

#[tokio::test]
async fn several_at_once_have_their_outcomes_in_order() {
    let (_, url) = Target::start(|seen| {
        let even = seen.headers["webhook-id"].to_str().unwrap().ends_with(['0', '2', '4', '6', '8']);
        Response::builder().status(if even { 200 } else { 422 }).body(Body::empty()).unwrap()
    })
    .await;
    let deliveries: Vec<_> = (0..10).map(plain).collect();
    let references: Vec<_> = deliveries.iter().collect();
    let sink = sink(config(url));
    let outcomes = tokio::time::timeout(DEADLINE, sink.deliver(&references)).await.expect("in time");
    let delivered: Vec<bool> = outcomes.iter().map(Outcome::is_delivered).collect();
    assert_eq!(delivered, [true, false].repeat(5));
    assert!(sink.deliver(&[]).await.is_empty());
    assert_eq!((sink.capabilities().batch_max, sink.capabilities().concurrency), (1, 16));
    sink.close().await;
    sink.close().await;
}

#[tokio::test]
async fn no_private_address_is_called_unless_it_is_allowed() {
    let (target, url) = Target::ok().await;
    let allowing = |url: &str, allow| HttpSink::new(HttpSinkConfig { allow, ..config(url) }, Arc::new(StillClock));
    // A URL with a private address is refused when the sink is built. The error says how to fix it.
    let reported = allowing(&url, Vec::new()).err().unwrap().to_string();
    assert!(reported.contains("allow = [\"127.0.0.1\"]"), "{reported}");
    let named = url.replace("127.0.0.1", "localhost");
    let reported = allowing(&named, Vec::new()).err().unwrap().to_string();
    assert!(reported.contains("allow = [\"127.0.0.1\", \"::1\"]"), "{reported}");
    assert!(
        allowing(&named, vec!["127.0.0.1/32".parse().unwrap()]).is_err(),
        "one of its two addresses is not allowed"
    );
    assert_eq!(target.seen().len(), 0);
    for url in [&url, &named] {
        let sink = allowing(url, this_machine()).unwrap();
        assert_eq!(short(&send(&sink, &plain(9)).await), ("delivered", ""));
    }
}

#[tokio::test]
async fn a_sink_never_calls_ourselves() {
    let (target, url) = Target::ok().await;
    let named = url.replace("127.0.0.1", "localhost");
    let own: std::net::SocketAddr = url.trim_start_matches("http://").parse().unwrap();
    let beside = |url: &str, listening: &str| {
        let listening = vec![listening.parse().unwrap()];
        HttpSink::new(HttpSinkConfig { listening, ..config(url) }, Arc::new(StillClock))
    };
    for listening in [own.to_string(), format!("0.0.0.0:{}", own.port()), format!("[::]:{}", own.port())] {
        for url in [&url, &named] {
            let reported = beside(url, &listening).err().unwrap().to_string();
            assert!(reported.contains("Postbox's own [server] listen"), "{reported}");
        }
    }
    assert_eq!(target.seen().len(), 0);
    for url in [&named, &url] {
        let sink = beside(url, "127.0.0.1:1").unwrap();
        assert_eq!(short(&send(&sink, &plain(2)).await), ("delivered", ""));
    }
}

/// Runs another test of this binary with proxies that would break it.
#[test]
fn proxy_variables_are_not_read() {
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    again.args(["--exact", "answers::several_at_once_have_their_outcomes_in_order"]);
    for variable in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy", "HTTPS_PROXY"] {
        again.env(variable, "http://127.0.0.1:1");
    }
    again.env_remove("no_proxy").env_remove("NO_PROXY");
    let output = again.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
