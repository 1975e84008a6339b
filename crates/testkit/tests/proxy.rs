//! Every fault of the proxy does what it says, against an echo server and a real Postgres.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use postbox_testkit::proxy::{Direction, Fault, FaultProxy};
use postbox_testkit::servers::{Postgres, Version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_postgres::{Client, NoTls};

const SEED: u64 = 7;
/// Far longer than anything takes.
const DEADLINE: Duration = Duration::from_secs(60);
/// What Postgres says when a commit is done.
const COMMITTED: &[u8] = b"COMMIT\0";

async fn echo_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
                // Says so when its client closes in an orderly way.
                let _ = write.write_all(b"bye").await;
            });
        }
    });
    address
}

async fn echo_proxy() -> (FaultProxy, TcpStream) {
    let proxy = FaultProxy::start(echo_server().await, SEED).await;
    let stream = TcpStream::connect(proxy.address()).await.expect("accepted");
    (proxy, stream)
}

async fn say(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).await.expect("written");
}

async fn hear(stream: &mut TcpStream, bytes: usize) -> std::io::Result<String> {
    let mut heard = vec![0; bytes];
    tokio::time::timeout(DEADLINE, stream.read_exact(&mut heard)).await.expect("an answer in time")?;
    Ok(String::from_utf8(heard).expect("text"))
}

/// What comes until the connection is reset.
async fn hear_until_reset(stream: &mut TcpStream) -> String {
    let mut heard = Vec::new();
    let ended = tokio::time::timeout(DEADLINE, stream.read_to_end(&mut heard)).await.expect("an end in time");
    assert_eq!(ended.expect_err("no orderly end").kind(), ErrorKind::ConnectionReset);
    String::from_utf8(heard).expect("text")
}

#[tokio::test]
async fn bytes_pass_unharmed() {
    let (proxy, mut stream) = echo_proxy().await;
    say(&mut stream, "hello").await;
    assert_eq!(hear(&mut stream, 5).await.expect("heard"), "hello");
    assert_eq!(proxy.connections(), 1);
}

#[tokio::test]
async fn delay_delays_and_heals() {
    let (proxy, mut stream) = echo_proxy().await;
    let base = Duration::from_millis(80);
    proxy.set(Direction::ToClient, Fault::Delay { base, jitter: Duration::from_millis(20) });
    let start = Instant::now();
    say(&mut stream, "slow").await;
    assert_eq!(hear(&mut stream, 4).await.expect("heard"), "slow");
    assert!(start.elapsed() >= base, "seed {}: {:?}", proxy.seed(), start.elapsed());
}

#[tokio::test]
async fn a_connection_is_cut_after_so_many_bytes_and_so_is_the_next() {
    let (proxy, mut stream) = echo_proxy().await;
    proxy.set(Direction::ToClient, Fault::CutAfter(3));
    for _ in 0..2 {
        say(&mut stream, "hello").await;
        // A reset may overtake what was passed on before it.
        let heard = hear_until_reset(&mut stream).await;
        assert!("hel".starts_with(&heard), "{heard}");
        stream = TcpStream::connect(proxy.address()).await.expect("accepted");
    }
}

#[tokio::test]
async fn held_bytes_come_in_order_when_released() {
    let (proxy, mut stream) = echo_proxy().await;
    proxy.set(Direction::ToClient, Fault::Hold);
    say(&mut stream, "one ").await;
    proxy.holding(Direction::ToClient).await;
    assert!(stream.readable().now_or_never().is_none(), "what is held has not passed");
    say(&mut stream, "two").await;
    proxy.heal();
    assert_eq!(hear(&mut stream, 7).await.expect("heard"), "one two");
}

#[tokio::test]
async fn a_black_hole_swallows_for_good() {
    let (proxy, mut stream) = echo_proxy().await;
    proxy.set(Direction::ToServer, Fault::Blackhole);
    say(&mut stream, "gone").await;
    proxy.holding(Direction::ToServer).await;
    proxy.heal();
    say(&mut stream, "here").await;
    assert_eq!(hear(&mut stream, 4).await.expect("heard"), "here");
}

#[tokio::test]
async fn a_half_close_ends_one_direction_only() {
    let (proxy, mut stream) = echo_proxy().await;
    proxy.set(Direction::ToServer, Fault::HalfClose);
    assert_eq!(hear(&mut stream, 3).await.expect("the server still answers"), "bye");
}

#[tokio::test]
async fn a_reset_is_a_reset() {
    let (proxy, mut stream) = echo_proxy().await;
    say(&mut stream, "x").await;
    hear(&mut stream, 1).await.expect("the connection is up");
    proxy.reset();
    assert_eq!(hear_until_reset(&mut stream).await, "");
}

#[tokio::test]
async fn refusing_refuses_and_open_connections_go_on() {
    let (proxy, mut stream) = echo_proxy().await;
    say(&mut stream, "x").await;
    hear(&mut stream, 1).await.expect("the connection is up");
    proxy.refuse().await;
    let refused = TcpStream::connect(proxy.address()).await.expect_err("refused");
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    say(&mut stream, "y").await;
    assert_eq!(hear(&mut stream, 1).await.expect("heard"), "y");
    proxy.accept().await;
    TcpStream::connect(proxy.address()).await.expect("accepted again");
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connected");
    tokio::spawn(connection);
    client
}

#[tokio::test]
async fn a_lost_answer_is_lost_whole_and_what_came_before_it_is_not() {
    let (proxy, mut stream) = echo_proxy().await;
    proxy.lose_answer(COMMITTED);
    // Its beginning alone is held back; it was not the answer, and passes.
    say(&mut stream, "one CO").await;
    assert_eq!(hear(&mut stream, 4).await.expect("heard"), "one ");
    say(&mut stream, "ME COMM").await;
    assert_eq!(hear(&mut stream, 5).await.expect("heard"), "COME ");
    say(&mut stream, "IT\0 too late").await;
    proxy.answer_lost(1).await;
    assert_eq!(hear_until_reset(&mut stream).await, "");
    // Once.
    let mut next = TcpStream::connect(proxy.address()).await.expect("accepted");
    say(&mut next, "COMMIT\0").await;
    assert_eq!(hear(&mut next, 7).await.expect("heard"), "COMMIT\0");
}

#[tokio::test]
async fn what_another_connection_lost_passes_on_this_one() {
    let (proxy, mut stream) = echo_proxy().await;
    proxy.lose_answer(COMMITTED);
    say(&mut stream, "COMM").await;
    let mut other = TcpStream::connect(proxy.address()).await.expect("accepted");
    say(&mut other, "COMMIT\0").await;
    proxy.answer_lost(1).await;
    assert_eq!(hear(&mut stream, 4).await.expect("heard"), "COMM");
}

/// The answer to the commit is not the next one that comes: those of a statement that is closed, and of a statement before, are on their way.
#[tokio::test]
async fn a_commit_happens_though_its_answer_is_lost() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let proxy = FaultProxy::in_front_of(&url, SEED).await;
    let direct = connect(&url).await;
    direct.batch_execute("CREATE TABLE t (n int)").await.expect("created");

    let mut client = connect(&proxy.url(&url)).await;
    let transaction = client.transaction().await.expect("begun");
    let insert = transaction.prepare("INSERT INTO t VALUES (1)").await.expect("prepared");
    proxy.lose_answer(COMMITTED);
    // They go to the server one by one, with time for the answers between them.
    let slow = Duration::from_millis(20);
    proxy.set(Direction::ToServer, Fault::Delay { base: slow, jitter: slow });
    let inserted = transaction.execute(&insert, &[]).now_or_never();
    assert!(inserted.is_none(), "sent, and not waited for");
    drop(insert);
    transaction.commit().await.expect_err("nobody told us");
    proxy.answer_lost(1).await;

    // The server has said that it did, so whoever asks sees it.
    let rows = direct.query("SELECT n FROM t", &[]).await.expect("a list");
    assert_eq!(rows.len(), 1, "the server did commit");
}
