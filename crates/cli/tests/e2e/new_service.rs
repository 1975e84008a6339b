//! `postbox new service`, and the service that it wrote.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, ChildStdout, Command};

use crate::env::{DEADLINE, Kind, TestEnv, get, signal, until};

/// In the example, the dependency is this workspace's library.
const DEPENDENCY: [&str; 2] = ["postbox = { version = \"0.1\",", "postbox = { path = \"../../crates/postbox\","];

/// Every file below a folder, by its relative path.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut open, mut found) = (vec![folder.to_path_buf()], Vec::new());
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(&next)? {
            let path = entry?.path();
            match path.is_dir() {
                true => open.push(path),
                false => found.push(path.strip_prefix(folder)?.to_path_buf()),
            }
        }
    }
    found.sort();
    Ok(found)
}

/// So the output is built, linted and tested with this workspace.
#[tokio::test]
async fn the_example_is_what_new_service_writes() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    env.ok(&["new", "service", "shop-service"])?;
    let (written, example) =
        (env.path("shop-service"), Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/service"));
    for file in files(&written)? {
        let text = std::fs::read_to_string(written.join(&file))?.replace(DEPENDENCY[0], DEPENDENCY[1]);
        let kept = std::fs::read_to_string(example.join(&file)).unwrap_or_default();
        ensure!(kept == text, "examples/service/{} differs from what is written", file.display());
    }
    ensure!(files(&written)? == files(&example)?, "examples/service has a file that is not written");
    Ok(())
}

#[tokio::test]
async fn a_service_has_the_name_that_was_given_and_overwrites_nothing() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    std::fs::create_dir(env.path("my-shop"))?;
    env.ok(&["new", "service", "my-shop"])?;
    let manifest = std::fs::read_to_string(env.path("my-shop/Cargo.toml"))?;
    ensure!(manifest.contains("name = \"my-shop\"\n") && manifest.contains(DEPENDENCY[0]), "{manifest}");
    ensure!(manifest.contains("# Without a release on crates.io: path = "), "{manifest}");
    let main = std::fs::read_to_string(env.path("my-shop/src/main.rs"))?;
    ensure!(main.contains("my_shop::run("), "{main}");
    for file in files(&env.path("my-shop"))? {
        let text = std::fs::read_to_string(env.path("my-shop").join(&file))?;
        ensure!(!text.contains("shop-service") && !text.contains("shop_service"), "{}: {text}", file.display());
    }

    std::fs::remove_file(env.path("my-shop/Cargo.toml"))?;
    let complaint = env.refuses(1, &["new", "service", "my-shop"])?;
    ensure!(complaint.contains("my-shop exists already and is not empty"), "{complaint}");
    ensure!(!env.path("my-shop/Cargo.toml").exists(), "it wrote into it");
    std::fs::write(env.path("a-file"), "")?;
    env.refuses(1, &["new", "service", "a-file"])?;
    for (name, why) in [
        ("../shop", "begins with a letter"),
        ("1shop", "begins with a letter"),
        ("Shop", "begins with a letter"),
        ("fn", "taken"),
        ("tokio", "taken"),
        (&"x".repeat(65), "at most 64"),
    ] {
        let complaint = env.refuses(2, &["new", "service", name])?;
        ensure!(complaint.contains(why), "{name}: {complaint}");
    }
    Ok(())
}

#[tokio::test]
async fn a_new_service_takes_an_order_confirms_it_and_stops() -> Result<()> {
    let env = TestEnv::empty(Kind::Postgres).await?;
    let (child, mut said, address) = start(&env.url).await?;
    let ready = async || Ok(get(&address, "/ready", "").await?.starts_with("HTTP/1.1 200").then_some(()));
    until("readiness", ready).await?;
    let holder = env.client().await?;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.migration").await?;
    let unready = get(&address, "/ready", "").await?;
    ensure!(unready.starts_with("HTTP/1.1 503") && unready.ends_with("\r\n\r\n"), "strangers get a reason: {unready}");
    ensure!(get(&address, "/health", "").await?.starts_with("HTTP/1.1 200"), "no balancer stays away");
    holder.batch_execute("COMMIT").await?;

    let answer = place(&address, r#"{"mail":"ann@example.com"}"#).await?;
    ensure!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("\r\n\r\n1"), "{answer}");
    let mail = line(&mut said).await?;
    ensure!(mail == "mail to ann@example.com: order 1 is placed", "{mail}");
    ensure!(place(&address, r#"{"mail":"nowhere"}"#).await?.ends_with("\r\n\r\n2"));
    let dead = async || Ok((env.ok(&["stats"])? == "pending=0 dispatched=1 dead=1 total=2\n").then_some(()));
    until("the death of an event without an address", dead).await?;

    stop(child).await?;
    ensure!(TcpStream::connect(&address).await.is_err(), "somebody still listens");
    Ok(())
}

/// Its database accepts the connection and never answers.
#[tokio::test]
async fn a_new_service_that_waits_for_its_database_can_be_stopped() -> Result<()> {
    let mute = TcpListener::bind("127.0.0.1:0").await?;
    let (child, ..) = start(&format!("postgres://postgres@{}/shop", mute.local_addr()?)).await?;
    let _waiting = tokio::time::timeout(DEADLINE, mute.accept()).await.context("it never connects")??;
    stop(child).await
}

type Said = Lines<BufReader<ChildStdout>>;

/// Starts the service's program, which is built with the tests of this workspace. Returns its
/// output and its address, too.
async fn start(url: &str) -> Result<(Child, Said, String)> {
    let program = Path::new(env!("CARGO_BIN_EXE_postbox")).with_file_name("shop-service");
    let mut command = Command::new(&program);
    command.env("DATABASE_URL", url).env("LISTEN", "127.0.0.1:0").stdout(Stdio::piped()).kill_on_drop(true);
    let cure = "build it: cargo build --workspace --all-features --bins";
    let mut child = command.spawn().with_context(|| format!("{}; {cure}", program.display()))?;
    let mut said = BufReader::new(child.stdout.take().context("no stdout")?).lines();
    let listening = line(&mut said).await?;
    let address = listening.strip_prefix("listening on http://").with_context(|| listening.clone())?;
    Ok((child, said, address.to_owned()))
}

async fn line(said: &mut Said) -> Result<String> {
    tokio::time::timeout(DEADLINE, said.next_line()).await.context("it says nothing")??.context("it ended")
}

async fn stop(mut child: Child) -> Result<()> {
    signal(child.id().context("it has ended")?, "TERM")?;
    let status = tokio::time::timeout(DEADLINE, child.wait()).await.context("it does not stop")??;
    ensure!(status.success(), "it ended with {status}");
    Ok(())
}

async fn place(address: &str, body: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let head = format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
    let request = format!("POST /orders HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{head}\r\n{body}");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}
