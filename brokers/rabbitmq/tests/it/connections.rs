//! Users, certificates, and the answers of `check-config --connect`.

use postbox_config::{SinkConfig as _, SourceConfig as _};
use postbox_core::{Error, ErrorKind, NewEvent};
use postbox_rabbitmq::RabbitmqSinkTable;
use postbox_testkit::receiving::source_context;
use postbox_testkit::sending::{self, PATIENCE, context, said, send};
use postbox_testkit::servers::{PrivateRabbitmq, Rabbitmq, listen_anywhere};
use postbox_testkit::tls;

use crate::broker::{Broker, arguments, quorum, unique};
use crate::stand::{sink, table};

async fn look_sink(url: &str, keys: &str) -> Result<String, Error> {
    let table: RabbitmqSinkTable = sending::table(&format!("url = {url:?}\n{keys}"));
    table.connect(&context(PATIENCE)).await
}

async fn look_source(url: &str, keys: &str) -> Result<String, Error> {
    table(url, keys).connect(&source_context()).await
}

#[tokio::test]
async fn what_is_missing_is_named_and_a_look_makes_nothing() {
    let url = Rabbitmq::shared().await.url();
    let (broker, name) = (Broker::connect(&url).await, unique("q"));
    let sink_keys = format!("exchange = {name:?}");
    let error = look_sink(&url, &sink_keys).await.expect_err("no exchange");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "rabbitmq_not_found"));
    assert!(error.message().contains(&name) && error.message().contains("declare it first"), "{error}");
    let keys = format!("queue = {name:?}\nexchange = {name:?}");
    let error = look_source(&url, &keys).await.expect_err("no exchange to bind to");
    assert_eq!(error.code(), "rabbitmq_not_found", "{error}");
    let error = look_source(&url, &format!("queue = {name:?}\ndead_letter_exchange = \"none\"")).await;
    let error = error.expect_err("no exchange to reject to");
    assert!(error.code() == "rabbitmq_not_found" && error.message().contains("the exchange none"), "{error}");
    let error = look_source(&url, &format!("queue = {name:?}\ncreate = false")).await.expect_err("no queue");
    assert!(error.message().contains("no queue"), "{error}");
    let found = look_source(&url, &format!("queue = {name:?}")).await.expect("it may be made");
    assert_eq!(found, format!("answers; the queue {name} will be created"));
    broker.exchange(&name).await;
    let options = lapin::options::QueueDeclareOptions { passive: true, ..Default::default() };
    let none = broker.channel.queue_declare(name.as_str().into(), options, arguments(&[])).await;
    assert!(none.is_err(), "a look makes nothing");
    let broker = Broker::connect(&url).await;
    broker.queue(&name, quorum(&[]), &name, "#").await;
    assert_eq!(look_sink(&url, &sink_keys).await.expect("there"), format!("answers; the exchange {name} exists"));
    assert_eq!(look_source(&url, &keys).await.expect("there"), format!("answers; the queue {name} exists"));
    assert_eq!(look_sink(&url, "exchange = \"{tenant}\"").await.expect("there"), "answers");
    let nobody = listen_anywhere().and_then(|listener| Ok(listener.local_addr()?)).expect("a port");
    let error = look_sink(&format!("amqp://{nobody}"), &sink_keys).await.expect_err("nobody");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Unavailable, "connect_refused"), "{error}");
    // The second of two addresses is used.
    let found = look_sink(&format!("amqp://{nobody},{url}"), &sink_keys).await.expect("the second");
    assert!(found.starts_with("answers"), "{found}");
}

#[tokio::test]
async fn users_virtual_hosts_and_permissions_are_the_server_s_to_grant() {
    let server = Rabbitmq::shared().await;
    let (writer, own, other) = (unique("writer"), unique("own"), unique("other"));
    server.ctl(&["add_user", &writer, "s3cret"]);
    server.ctl(&["set_permissions", &writer, "^$", &format!("^{own}$"), "^$"]);
    let broker = Broker::connect(&server.url()).await;
    broker.exchange(&own).await;
    broker.exchange(&other).await;
    broker.queue(&own, quorum(&[]), &own, "#").await;
    let look = async |url: &str, password: &str| {
        let keys = format!("user = {writer:?}\npassword = {password:?}\nexchange = {own:?}");
        look_sink(url, &keys).await
    };
    let error = look(&server.url(), "wrong").await.expect_err("wrong password");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Unauthorized, "rabbitmq_unauthorized"), "{error}");
    assert!(!format!("{error:?}").contains("wrong\""), "{error:?}");
    let error = look(&format!("{}/{other}", server.url()), "s3cret").await.expect_err("no such host");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Unauthorized, "rabbitmq_vhost_refused"), "{error}");
    look(&server.url(), "s3cret").await.expect("right");
    let user = format!("user = {writer:?}\npassword = \"s3cret\"\n");
    let allowed = sink(&server.url(), &format!("{user}exchange = {own:?}")).await;
    assert_eq!(said(&send(&allowed, NewEvent::json("t", "{}")).await), "delivered");
    let refused = sink(&server.url(), &format!("{user}exchange = {other:?}")).await;
    let outcome = send(&refused, NewEvent::json("t", "{}")).await;
    assert_eq!(said(&outcome), "ambiguous rabbitmq_access_refused", "{outcome:?}");
    let keys = format!("{user}queue = {own:?}");
    let source = table(&server.url(), &keys).build(&source_context()).await.expect("a source");
    let error = source.next(1).await.expect_err("it may not read");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Unauthorized, "rabbitmq_access_refused"), "{error}");
}

#[tokio::test]
async fn only_a_server_with_a_trusted_certificate_gets_events() {
    let folder = tempfile::tempdir().expect("a folder");
    let [cert, key] = tls::self_signed(folder.path()).map(|file| file.display().to_string());
    let port = listen_anywhere().and_then(|listener| Ok(listener.local_addr()?.port())).expect("a port");
    let config = format!(
        "listeners.ssl.1 = 127.0.0.1:{port}\nssl_options.certfile = {cert}\nssl_options.keyfile = {key}\n\
         ssl_options.verify = verify_none\n"
    );
    let server = PrivateRabbitmq::launch_with(&config).await;
    Broker::connect(&server.url()).await.queue("q", quorum(&[]), "amq.topic", "#").await;
    let url = format!("amqps://localhost:{port}");
    let trusting = sink(&url, &format!("exchange = \"amq.topic\"\ntls = {{ ca_file = {cert:?} }}")).await;
    assert_eq!(said(&send(&trusting, NewEvent::json("t", "{}")).await), "delivered");
    let doubting = sink(&url, "exchange = \"amq.topic\"").await;
    let outcome = send(&doubting, NewEvent::json("t", "{}")).await;
    assert_eq!(said(&outcome), "unavailable tls_failed", "{outcome:?}");
    assert!(format!("{outcome:?}").contains("UnknownIssuer"), "{outcome:?}");
    let lost = sink(&url, "exchange = \"amq.topic\"\ntls = { ca_file = \"/nonexistent/ca.pem\" }").await;
    assert_eq!(said(&send(&lost, NewEvent::json("t", "{}")).await), "unavailable rabbitmq_config_invalid");
}
