//! Opens a connection to the first server of a URL's list that answers as the URL requires.
//!
//! The driver tries one server after another, and waits for one that is silent until the caller
//! gives up. Here the next one is tried beside it.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deadpool_postgres::Connect;
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use postbox_core::lock;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::config::{Host, LoadBalanceHosts};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config, Connection, Error, Socket};
use tracing::warn;

use crate::classify::{classify, said};
use crate::connect::Tls;

/// How long a server may be silent before the next one is tried as well. Far longer than one on the
/// same network takes. Status queries give up after two seconds, which must be enough to pass two
/// silent servers.
const NEXT_AFTER: Duration = Duration::from_millis(500);

/// How much longer the pool waits than [`Servers::open`] takes, so that the latter ends first and
/// notes what each server said.
const SPARE: Duration = Duration::from_millis(250);

/// A connection, and the task's half of it.
type Opened = (Client, Connection<Socket, <Tls as MakeTlsConnect<Socket>>::Stream>);

/// The servers of a URL. Clones share what the servers said.
#[derive(Clone)]
pub(crate) struct Servers {
    list: Arc<[Server]>,
    tls: Tls,
    /// The longest that opening a connection takes, with all servers together.
    limit: Duration,
    next_after: Duration,
    is_random: bool,
    /// Why no server was connected to the last time. Empty if one was.
    said: Arc<Mutex<String>>,
}

struct Server {
    name: String,
    /// The URL's settings, for this server alone.
    settings: Config,
    /// The name and port to look up. Each address that is found is tried like a server.
    lookup: Option<(String, u16)>,
}

/// Which server was not connected to, and the error of each of its addresses.
type Failed = (usize, Vec<Error>);

impl Servers {
    pub(crate) fn new(settings: &Config, tls: Tls, limit: Duration) -> Self {
        let names = names(settings);
        let (hosts, addresses) = (settings.get_hosts().len(), settings.get_hostaddrs().len());
        let fits = |given: usize, few: usize| given <= few || given == names.len();
        let list: Vec<Server> = if fits(hosts, 0) && fits(addresses, 0) && fits(settings.get_ports().len(), 1) {
            names.into_iter().enumerate().map(|(nth, name)| Server::of(settings, nth, name)).collect()
        } else {
            // The driver says what is wrong.
            vec![Server { name: names.join(","), settings: settings.clone(), lookup: None }]
        };
        let steps = u32::try_from(list.len() + 1).unwrap_or(u32::MAX);
        Self {
            next_after: NEXT_AFTER.min(limit / steps),
            list: list.into(),
            tls,
            limit,
            is_random: settings.get_load_balance_hosts() == LoadBalanceHosts::Random,
            said: Arc::default(),
        }
    }

    /// The longest that the pool may wait for [`Self::open`].
    pub(crate) fn pool_limit(&self) -> Duration {
        self.limit + SPARE
    }

    /// What each server said when none was connected to the last time, if there are several: text
    /// without a semicolon, to be put after what happened.
    pub(crate) fn said(&self) -> String {
        lock(&self.said).clone()
    }

    /// Opens a connection, within the limit. The error is the last one that may pass: a server that
    /// lacks the database, say, must not hide that another one is down. None, if that one says
    /// nothing.
    pub(crate) async fn open(&self) -> Result<Opened, Option<Error>> {
        let mut failed = Vec::new();
        let asked: Vec<_> = self.in_turn((0..self.list.len()).collect()).map(|nth| self.ask(nth)).collect();
        let opened = timeout(self.limit, self.first_of(asked, &mut failed)).await.ok().flatten();
        *lock(&self.said) = match opened {
            None if self.list.len() > 1 => self.what_was_said(&failed),
            _ => String::new(),
        };
        let is_silent = failed.len() < self.list.len();
        let mut errors: Vec<Error> = failed.into_iter().filter_map(|(_, mut errors)| errors.pop()).collect();
        let may_pass = |error: &Error| !classify("connect", error).is_permanent();
        if is_silent || errors.iter().any(may_pass) {
            errors.retain(may_pass);
        }
        opened.ok_or_else(|| errors.pop())
    }

    /// Connects to one server, at the first of its addresses that answers as required.
    async fn ask(&self, nth: usize) -> Result<Opened, Failed> {
        let server = &self.list[nth];
        let mut addresses = Vec::new();
        if let Some((name, port)) = &server.lookup
            && let Ok(found) = tokio::net::lookup_host((name.as_str(), *port)).await
        {
            addresses.extend(found.map(|address| server.settings.clone().hostaddr(address.ip()).clone()));
        }
        if addresses.is_empty() {
            addresses.push(server.settings.clone());
        }
        let connect = |settings: Config| {
            let tls = self.tls.clone();
            async move { settings.connect(tls).await }
        };
        let asked: Vec<_> = self.in_turn(addresses).map(connect).collect();
        let mut errors = Vec::new();
        let opened = self.first_of(asked, &mut errors).await;
        opened.ok_or((nth, errors))
    }

    /// The order in which to try: the given one, or none if the URL says so.
    fn in_turn<T>(&self, list: Vec<T>) -> impl Iterator<Item = T> + use<T> {
        let random = RandomState::new();
        let mut list: Vec<(usize, T)> = list.into_iter().enumerate().collect();
        if self.is_random {
            list.sort_by_cached_key(|(nth, _)| random.hash_one(nth));
        }
        list.into_iter().map(|(_, one)| one)
    }

    /// The first success. The next one is tried when one has failed, or says nothing for a while:
    /// it may still succeed. Adds the errors in the order in which they came.
    async fn first_of<T, E>(&self, asked: Vec<impl Future<Output = Result<T, E>>>, failed: &mut Vec<E>) -> Option<T> {
        let mut rest = asked.into_iter();
        let mut running = FuturesUnordered::new();
        loop {
            running.extend(rest.next());
            let ended = match rest.len() {
                0 => running.next().await,
                _ => match timeout(self.next_after, running.next()).await {
                    Ok(ended) => ended,
                    Err(_) => continue,
                },
            };
            match ended? {
                Ok(first) => return Some(first),
                Err(error) => failed.push(error),
            }
        }
    }

    fn what_was_said(&self, failed: &[Failed]) -> String {
        let by = |(nth, server): (usize, &Server)| {
            let errors = failed.iter().find(|(of, _)| *of == nth).map(|(_, errors)| errors.as_slice());
            let what = errors.unwrap_or_default().last().map_or_else(|| "no answer in time".to_owned(), said);
            format!("{}: {what}", server.name)
        };
        let all: Vec<String> = self.list.iter().enumerate().map(by).collect();
        format!(" [{}]", all.join(", "))
    }
}

/// For the pool.
impl Connect for Servers {
    fn connect(&self, _: &Config) -> BoxFuture<'_, Result<(Client, JoinHandle<()>), Error>> {
        Box::pin(async move {
            match self.open().await {
                Ok((client, connection)) => {
                    let task = tokio::spawn(async move {
                        if let Err(error) = connection.await {
                            warn!(target: "deadpool.postgres", "Connection error: {error}");
                        }
                    });
                    Ok((client, task))
                }
                Err(Some(error)) => Err(error),
                // The driver has no error that we could make. The pool gives up in a moment.
                Err(None) => std::future::pending().await,
            }
        })
    }
}

impl Server {
    /// The server at a place of the URL's list.
    fn of(settings: &Config, nth: usize, name: String) -> Self {
        let mut one = Config::new();
        one.ssl_mode(settings.get_ssl_mode())
            .ssl_negotiation(settings.get_ssl_negotiation())
            .keepalives(settings.get_keepalives())
            .keepalives_idle(settings.get_keepalives_idle())
            .target_session_attrs(settings.get_target_session_attrs())
            .channel_binding(settings.get_channel_binding())
            .load_balance_hosts(settings.get_load_balance_hosts());
        if let Some(user) = settings.get_user() {
            one.user(user);
        }
        if let Some(password) = settings.get_password() {
            one.password(password);
        }
        if let Some(database) = settings.get_dbname() {
            one.dbname(database);
        }
        if let Some(options) = settings.get_options() {
            one.options(options);
        }
        if let Some(program) = settings.get_application_name() {
            one.application_name(program);
        }
        if let Some(limit) = settings.get_connect_timeout() {
            one.connect_timeout(*limit);
        }
        if let Some(limit) = settings.get_tcp_user_timeout() {
            one.tcp_user_timeout(*limit);
        }
        if let Some(interval) = settings.get_keepalives_interval() {
            one.keepalives_interval(interval);
        }
        if let Some(retries) = settings.get_keepalives_retries() {
            one.keepalives_retries(retries);
        }
        let port = port(settings, nth);
        one.port(port);
        let address = settings.get_hostaddrs().get(nth);
        if let Some(address) = address {
            one.hostaddr(*address);
        }
        let mut lookup = None;
        match settings.get_hosts().get(nth) {
            Some(Host::Tcp(host)) => {
                one.host(host.as_str());
                lookup = address.is_none().then(|| (host.clone(), port));
            }
            #[cfg(unix)]
            Some(Host::Unix(folder)) => {
                one.host_path(folder);
            }
            None => {}
        }
        Self { name, settings: one, lookup }
    }
}

fn port(settings: &Config, nth: usize) -> u16 {
    let ports = settings.get_ports();
    ports.get(nth).or(ports.first()).copied().unwrap_or(5432)
}

/// The servers of a URL, with their ports.
pub(crate) fn names(settings: &Config) -> Vec<String> {
    let hosts = settings.get_hosts().iter().map(|host| match host {
        Host::Tcp(name) => name.clone(),
        #[cfg(unix)]
        Host::Unix(folder) => folder.display().to_string(),
    });
    let addresses = settings.get_hostaddrs().iter().map(ToString::to_string);
    let hosts: Vec<String> = if hosts.len() > 0 { hosts.collect() } else { addresses.collect() };
    hosts.iter().enumerate().map(|(nth, host)| format!("{host}:{}", port(settings, nth))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(url: &str) -> Vec<Server> {
        let settings: Config = url.parse().expect("a url");
        let names = names(&settings);
        names.into_iter().enumerate().map(|(nth, name)| Server::of(&settings, nth, name)).collect()
    }

    /// A setting that the driver adds must not get lost here.
    #[test]
    fn a_server_alone_has_every_setting_of_the_url() {
        let url = "postgres://u:p@h:5433/d?options=-c%20a%3Db&application_name=a&sslmode=require&connect_timeout=3&\
                   sslnegotiation=direct&hostaddr=127.0.0.1&tcp_user_timeout=4&keepalives=0&keepalives_idle=5&\
                   keepalives_interval=6&keepalives_retries=7&target_session_attrs=read-write&\
                   channel_binding=disable&load_balance_hosts=random";
        assert_eq!(of(url)[0].settings, url.parse::<Config>().expect("a url"));
    }

    #[test]
    fn each_server_of_a_list_has_its_port() {
        let hosts = of("postgres://u@a:1,b:2/d");
        assert_eq!([&hosts[0].name, &hosts[1].name], ["a:1", "b:2"]);
        assert_eq!(hosts[1].settings, "postgres://u@b:2/d".parse::<Config>().expect("a url"));
        assert_eq!(hosts[1].lookup, Some(("b".to_owned(), 2)));
        let folder = of("host=/run/a,b port=7 user=u dbname=d");
        assert_eq!([&folder[0].name, &folder[1].name], ["/run/a:7", "b:7"]);
        assert_eq!((&folder[0].lookup, &folder[1].lookup), (&None, &Some(("b".to_owned(), 7))));
    }
}
