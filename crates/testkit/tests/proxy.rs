//! The proxy's faults against an echo server, and its traps against Postgres and through a pooler.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use postbox_testkit::proxy::{Direction, FaultProxy, Harm, Point, Trap};
use postbox_testkit::servers::{PgBouncer, Postgres, Version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_postgres::{Client, NoTls};

/// Far longer than anything takes.
const DEADLINE: Duration = Duration::from_secs(60);

async fn echo_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    address
}

async fn echo_proxy() -> (FaultProxy, TcpStream) {
    let proxy = FaultProxy::start(echo_server().await).await;
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

#[tokio::test]
async fn bytes_pass_unharmed() {
    let (proxy, mut stream) = echo_proxy().await;
    say(&mut stream, "hello").await;
    assert_eq!(hear(&mut stream, 5).await.expect("heard"), "hello");
    assert_eq!(proxy.connections(), 1);
}

#[tokio::test]
async fn a_black_hole_swallows_for_good() {
    let (proxy, mut stream) = echo_proxy().await;
    proxy.swallow(&[Direction::ToServer]);
    say(&mut stream, "gone").await;
    proxy.swallowed(Direction::ToServer).await;
    proxy.heal();
    say(&mut stream, "here").await;
    assert_eq!(hear(&mut stream, 4).await.expect("heard"), "here");
}

#[tokio::test]
async fn a_reset_is_a_reset() {
    let (proxy, mut stream) = echo_proxy().await;
    say(&mut stream, "x").await;
    hear(&mut stream, 1).await.expect("the connection is up");
    proxy.reset();
    assert_eq!(hear(&mut stream, 1).await.expect_err("no orderly end").kind(), ErrorKind::ConnectionReset);
}

/// A table in a database, a proxy in front of it, and a direct connection.
struct Stand {
    proxy: FaultProxy,
    through: String,
    direct: Client,
    _pooler: Option<PgBouncer>,
}

impl Stand {
    async fn new(pooled: bool) -> Self {
        let server = Postgres::shared(Version::V15).await;
        let url = server.fresh_database().await;
        let pooler = if pooled { Some(PgBouncer::start(&server).await) } else { None };
        let front = pooler.as_ref().map_or(url.clone(), |pooler| pooler.url(&url));
        let proxy = FaultProxy::in_front_of(&front).await;
        let direct = connect(&url).await;
        direct.batch_execute("CREATE TABLE t (n int)").await.expect("created");
        Self { through: proxy.url(&front), proxy, direct, _pooler: pooler }
    }

    async fn client(&self) -> Client {
        connect(&self.through).await
    }

    async fn rows(&self) -> Vec<i32> {
        let rows = self.direct.query("SELECT n FROM t ORDER BY n", &[]).await.expect("a list");
        rows.iter().map(|row| row.get(0)).collect()
    }
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connected");
    tokio::spawn(connection);
    client
}

/// Inserts with all messages sent at once, as the store does.
async fn insert(client: &Client, n: i32) -> Result<(), tokio_postgres::Error> {
    let insert = format!("INSERT INTO t VALUES ({n})");
    let (begun, inserted, committed) =
        futures::join!(client.batch_execute("BEGIN"), client.query_typed(&insert, &[]), client.batch_execute("COMMIT"));
    begun.and(inserted.map(drop)).and(committed)
}

fn statement(text: &str) -> Point {
    Point::Statement(text.to_owned())
}

async fn sprung(trap: &Trap) {
    tokio::time::timeout(DEADLINE, trap.sprung()).await.expect("the call came");
}

async fn released(trap: &Trap) -> Vec<String> {
    tokio::time::timeout(DEADLINE, trap.release()).await.expect("an answer in time")
}

#[tokio::test]
async fn a_cut_call_never_reaches_the_server() {
    let stand = Stand::new(false).await;
    let trap = stand.proxy.trap(statement("VALUES (1)"), Harm::Cut);
    let client = stand.client().await;
    insert(&client, 0).await.expect("not this one");
    assert!(!trap.is_sprung());
    insert(&client, 1).await.expect_err("cut");
    sprung(&trap).await;
    insert(&stand.client().await, 2).await.expect("once");
    assert_eq!(stand.rows().await, [0, 2]);
}

#[tokio::test]
async fn the_nth_message_is_counted_over_all_connections() {
    let stand = Stand::new(false).await;
    let (one, two) = (stand.client().await, stand.client().await);
    let trap = stand.proxy.trap(Point::Message(3), Harm::Cut);
    one.batch_execute("INSERT INTO t VALUES (1)").await.expect("the first");
    two.batch_execute("INSERT INTO t VALUES (2)").await.expect("the second");
    one.batch_execute("INSERT INTO t VALUES (3)").await.expect_err("the third");
    two.batch_execute("INSERT INTO t VALUES (4)").await.expect("the other goes on");
    assert_eq!((trap.is_sprung(), stand.rows().await), (true, vec![1, 2, 4]));
}

#[tokio::test]
async fn the_server_does_it_though_its_answer_is_lost() {
    for pooled in [false, true] {
        let stand = Stand::new(pooled).await;
        let trap = stand.proxy.trap(statement("VALUES (1)"), Harm::LoseAnswer);
        insert(&stand.client().await, 1).await.expect_err("its answer is lost");
        sprung(&trap).await;
        assert_eq!(trap.answer().await, ["BEGIN", "INSERT 0 1", "COMMIT"]);
        // Once with a single statement, once with a transaction whose client waits for every
        // answer.
        let trap = stand.proxy.trap(statement("VALUES (2)"), Harm::LoseAnswer);
        stand.client().await.query_typed("INSERT INTO t VALUES (2)", &[]).await.expect_err("its answer is lost");
        assert_eq!(trap.answer().await, ["INSERT 0 1"]);
        let trap = stand.proxy.trap(Point::CommitOf("VALUES (3)".to_owned()), Harm::LoseAnswer);
        let mut client = stand.client().await;
        let transaction = client.transaction().await.expect("begun");
        transaction.batch_execute("INSERT INTO t VALUES (3)").await.expect("this answer is heard");
        transaction.commit().await.expect_err("this one is not");
        assert_eq!(trap.answer().await, ["START TRANSACTION", "INSERT 0 1", "COMMIT"]);
        assert_eq!(trap.call().len(), 3, "{:?}", trap.call());
        assert_eq!(stand.rows().await, [1, 2, 3]);
    }
}

#[tokio::test]
async fn a_delayed_call_is_done_after_the_client_has_asked_again() {
    for pooled in [false, true] {
        let stand = Stand::new(pooled).await;
        let trap = stand.proxy.trap(statement("VALUES (1)"), Harm::Delay);
        insert(&stand.client().await, 1).await.expect_err("reset");
        sprung(&trap).await;
        insert(&stand.client().await, 1).await.expect("again, and before");
        assert_eq!(stand.rows().await, [1]);
        assert_eq!(released(&trap).await, ["BEGIN", "INSERT 0 1", "COMMIT"]);
        assert_eq!(stand.rows().await, [1, 1], "twice");
    }
}

#[tokio::test]
async fn a_delayed_commit_keeps_its_locks() {
    let stand = Stand::new(false).await;
    insert(&stand.direct, 1).await.expect("a row");
    let trap = stand.proxy.trap(Point::CommitOf("SET n = 2".to_owned()), Harm::Delay);
    let mut client = stand.client().await;
    let transaction = client.transaction().await.expect("begun");
    transaction.batch_execute("UPDATE t SET n = 2").await.expect("done, not committed");
    transaction.commit().await.expect_err("reset");
    sprung(&trap).await;
    let skip = "SELECT FROM t FOR UPDATE SKIP LOCKED";
    assert!(stand.direct.query(skip, &[]).await.expect("asked").is_empty(), "locked");
    assert_eq!(released(&trap).await.last().map(String::as_str), Some("COMMIT"));
    assert_eq!(stand.rows().await, [2]);
}

#[tokio::test]
async fn a_client_may_be_left_waiting_and_go_away() {
    let stand = Stand::new(false).await;
    let client = stand.client().await;
    let trap = stand.proxy.trap(statement("VALUES (1)"), Harm::Hang);
    tokio::select! {
        answer = insert(&client, 1) => panic!("{answer:?}"),
        () = sprung(&trap) => {}
    }
    drop(client);
    assert_eq!(released(&trap).await.last().map(String::as_str), Some("COMMIT"));
    assert_eq!(stand.rows().await, [1]);
}

#[tokio::test]
async fn a_dropped_trap_is_disarmed_and_throws_away_what_it_holds() {
    let stand = Stand::new(false).await;
    drop(stand.proxy.trap(statement("VALUES (1)"), Harm::Cut));
    insert(&stand.client().await, 1).await.expect("disarmed");
    let trap = stand.proxy.trap(statement("VALUES (2)"), Harm::Delay);
    insert(&stand.client().await, 2).await.expect_err("reset");
    sprung(&trap).await;
    drop(trap);
    insert(&stand.client().await, 3).await.expect("done");
    assert_eq!(stand.rows().await, [1, 3]);
}
