//! Authentication, TLS, and the answers of `check-config --connect`.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use postbox_config::{SinkConfig as _, SourceConfig as _};
use postbox_core::{ErrorKind, NewEvent};
use postbox_mqtt::MqttSinkTable;
use postbox_testkit::receiving::source_context;
use postbox_testkit::sending::{self, PATIENCE, context, said, send};
use postbox_testkit::servers::{PrivateMqtt, listen_anywhere};
use postbox_testkit::tls;

use crate::support::{Peer, server, sink, source, table};

const KEYS: &str = "topic = \"in/{topic}\"\nmandatory = false\n";

/// The password is `secret-word`, as `mosquitto_passwd` hashes it.
const USERS: &str = "writer:$7$101$Cy1Y+bA77UywRsKp$v5jv31GgQfJRCul/peiVG5LRJYCT9\
    Te7HzAaopBBU/D1S21q411ybFchaA4l0bx1yzUQ15U8u/Lohbjz83baNA==\n";

async fn outcome(url: &str, keys: &str) -> String {
    said(&send(&sink(url, &format!("{KEYS}{keys}")).await, NewEvent::json("t", "{}")).await)
}

#[tokio::test]
async fn a_password_is_needed_and_nobody_sees_it() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("ours");
    let (users, rules) = (folder.path().join("users"), folder.path().join("rules"));
    fs::write(&users, USERS).expect("written");
    fs::write(&rules, "user writer\ntopic write in/t\n").expect("written");
    let config = format!("password_file {}\nacl_file {}\n", users.display(), rules.display());
    let server = PrivateMqtt::launch_with(&config).await;
    let as_writer = |password: &str| format!("user = \"writer\"\npassword = {password:?}");
    assert_eq!(outcome(&server.url(), &as_writer("secret-word")).await, "delivered");
    for wrong in [&as_writer("another-word"), ""] {
        assert_eq!(outcome(&server.url(), wrong).await, "unavailable mqtt_unauthorized", "{wrong}");
    }
    let keys = format!("topic = \"other/{{topic}}\"\n{}", as_writer("secret-word"));
    let refused = send(&sink(&server.url(), &keys).await, NewEvent::json("t", "{}")).await;
    assert_eq!(said(&refused), "ambiguous mqtt_not_permitted", "its topic is another's");
    let keys = format!("client_id = \"r\"\ntopic = \"in/#\"\n{}", as_writer("another-word"));
    let error = source(&server.url(), &keys).await.next(1).await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Unauthorized, "mqtt_unauthorized"));
    assert!(!format!("{error:?} {refused:?}").contains("-word"));
}

#[tokio::test]
async fn tls_needs_the_right_authority_and_shows_our_certificate() {
    let folder = tempfile::tempdir().expect("a folder");
    tls::authority(folder.path());
    let path = |name: &str| folder.path().join(name).display().to_string();
    let port = listen_anywhere().expect("a port").local_addr().expect("an address").port();
    let config = format!(
        "allow_anonymous true\nlistener {port} 127.0.0.1\ncafile {}\ncertfile {}\nkeyfile {}\nrequire_certificate true\n",
        path("ca.pem"),
        path("server.pem"),
        path("server.key")
    );
    let server = PrivateMqtt::launch_with(&config).await;
    let url = format!("mqtts://127.0.0.1:{port}");
    let ca = format!("ca_file = {:?}", path("ca.pem"));
    let cert = format!("client_cert = {:?}, client_key = {:?}", path("client.pem"), path("client.key"));
    assert_eq!(outcome(&url, &format!("tls = {{ {ca}, {cert} }}")).await, "delivered");
    for without in [format!("tls = {{ {cert} }}"), format!("tls = {{ {ca} }}"), String::new()] {
        let said = outcome(&url, &without).await;
        assert!(said.starts_with("unavailable "), "{without}: {said}");
    }
    let lost = outcome(&url, "tls = { ca_file = \"/nonexistent/ca.pem\" }").await;
    assert_eq!(lost, "unavailable mqtt_config_invalid");
    let plain = outcome(&server.url().replace("mqtt:", "mqtts:"), &format!("tls = {{ {ca} }}")).await;
    assert!(plain.starts_with("unavailable "), "a server without TLS is not talked to: {plain}");
}

/// `check-config --connect` displaces no other client, and creates nothing.
#[tokio::test]
async fn a_look_disturbs_nobody() {
    let server = server().await;
    let mut there = Peer::connect_as(&server.url(), "orders-1", |options| {
        options.set_clean_start(false).set_session_expiry_interval(Some(60));
    })
    .await;
    there.subscribe("orders/#").await;
    let keys = "client_id = \"orders-1\"\ntopic = \"orders/#\"";
    assert_eq!(table(&server.url(), keys).connect(&source_context()).await.expect("it answers"), "answers");
    let look = async |url: &str| {
        let table: MqttSinkTable = sending::table(&format!("url = {url:?}\n{KEYS}"));
        table.connect(&context(PATIENCE)).await
    };
    assert_eq!(look(&server.url()).await.expect("it answers"), "answers");
    let mut publisher = Peer::connect(&server.url()).await;
    publisher.publish("orders/1", &[], b"still there").await;
    assert_eq!(&there.next().await.payload[..], b"still there");
    let nobody = look("mqtt://127.0.0.1:1").await.expect_err("nobody");
    assert_eq!((nobody.kind(), nobody.code()), (ErrorKind::Unavailable, "connect_refused"));
}
