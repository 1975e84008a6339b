//! A subscription: a named reader of one log.

use std::borrow::Cow;
use std::fmt;

use crate::error::Result;
use crate::event::{Headers, KIND_DEFAULT, check_headers, check_word_of, header};
use crate::kit::check_lanes;
use crate::names::{LogName, SubscriptionName, Tenant, TopicPattern};

/// The order in which events reach the sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ordering {
    /// Events of one key in commit order, one unacknowledged at a time. Different keys
    /// concurrently.
    #[default]
    Key,
    /// No order, everything at once.
    None,
}

/// What happens to a key when one of its events becomes dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDead {
    /// The next event of the key goes out.
    #[default]
    Continue,
    /// The key waits until a person retries or discards the dead event.
    Halt,
}

impl OnDead {
    /// Returns the lower-case word, as stored and written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Continue => "continue",
            Self::Halt => "halt",
        }
    }
}

/// Where a new subscription starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StartAt {
    /// With the oldest event still in the log.
    #[default]
    Beginning,
    /// With events that commit after the subscription was created.
    Now,
}

/// Which events of the log a subscription wants. Other events are passed and never counted.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct Filter {
    /// Any of these; empty means all topics.
    pub topics: Vec<TopicPattern>,
    /// Only this tenant's events.
    pub tenant: Option<Tenant>,
    /// Any of these, by their exact names; empty means all kinds. An event without a kind has the
    /// kind `domain`.
    pub kinds: Vec<String>,
    /// Any of these, by their exact names; empty means all events, with or without an aggregate.
    pub aggregates: Vec<String>,
    /// All of these, with exactly these values.
    pub headers: Headers,
}

/// What a filter compares of an event, except its headers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Traits<'a> {
    /// Its topic.
    pub topic: &'a str,
    /// Its tenant.
    pub tenant: Option<&'a str>,
    /// Its kind, if it has one.
    pub kind: Option<&'a str>,
    /// Its aggregate.
    pub aggregate: Option<&'a str>,
}

impl Filter {
    /// Returns whether an event is wanted. Its headers are only requested if the filter names some,
    /// because a store may have to parse them.
    pub fn matches<'h>(&self, of: Traits<'_>, headers: impl FnOnce() -> Cow<'h, Headers>) -> bool {
        let among = |wanted: &[String], name: Option<&str>| {
            wanted.is_empty() || name.is_some_and(|name| wanted.iter().any(|it| it == name))
        };
        self.wants_topic(of.topic)
            && self.tenant.as_ref().is_none_or(|wanted| of.tenant == Some(wanted.as_str()))
            && among(&self.kinds, Some(of.kind.unwrap_or(KIND_DEFAULT)))
            && among(&self.aggregates, of.aggregate)
            && (self.headers.is_empty() || header::has_all(&headers(), &self.headers))
    }

    /// Returns whether the topic is wanted, whatever else the filter asks for.
    pub fn wants_topic(&self, topic: &str) -> bool {
        self.topics.is_empty() || self.topics.iter().any(|pattern| pattern.matches(topic))
    }

    /// Checks that events like this can exist. A filter for impossible ones is probably a mistake.
    pub fn validate(&self) -> Result<()> {
        self.kinds.iter().try_for_each(|kind| check_word_of("kind", kind))?;
        self.aggregates.iter().try_for_each(|aggregate| check_word_of("aggregate", aggregate))?;
        check_headers(&self.headers)
    }
}

/// Shows the topics, then the rest: `order.* kind=integration region=eu`.
impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let topics: Vec<&str> = self.topics.iter().map(TopicPattern::as_str).collect();
        f.write_str(&if topics.is_empty() { "*".to_owned() } else { topics.join(" ") })?;
        let lists = [("kind", &self.kinds), ("aggregate", &self.aggregates)];
        for (what, names) in lists.into_iter().filter(|(_, names)| !names.is_empty()) {
            write!(f, " {what}={}", names.join("|"))?;
        }
        self.headers.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))?;
        self.tenant.as_ref().map_or(Ok(()), |tenant| write!(f, " tenant={tenant}"))
    }
}

/// A named reader of one log. Replicas that name the same subscription share its work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subscription {
    /// Its name, unique in the store.
    pub name: SubscriptionName,
    /// The log it reads.
    pub log: LogName,
    /// Which events it wants.
    pub filter: Filter,
    /// The order of deliveries.
    pub ordering: Ordering,
    /// What happens to a key when one of its events becomes dead, by its relay or by a person
    /// ([`Change::MarkDead`](crate::Change::MarkDead)).
    pub on_dead: OnDead,
    /// How many replicas can work at once; 1 is a single active relay with hot standbys. `None` is
    /// what suits the store: two, and on SQLite one. Used only when the subscription is created;
    /// later [`Admin::set_lanes`](crate::Admin::set_lanes) changes it.
    pub lanes: Option<u16>,
    /// Where it starts when it is new.
    pub start: StartAt,
}

impl Subscription {
    /// Creates a subscription to everything in `log`, in key order, from the beginning, with as
    /// many lanes as suit the store.
    pub fn new(name: SubscriptionName, log: LogName) -> Self {
        Self {
            name,
            log,
            filter: Filter::default(),
            ordering: Ordering::default(),
            on_dead: OnDead::default(),
            lanes: None,
            start: StartAt::default(),
        }
    }

    /// Returns whether a dead event holds its key.
    pub fn halts(&self) -> bool {
        self.ordering == Ordering::Key && self.on_dead == OnDead::Halt
    }

    /// Checks the filter and the number of lanes.
    pub fn validate(&self) -> Result<()> {
        self.filter.validate()?;
        self.lanes.map_or(Ok(()), |lanes| check_lanes("subscribe", &self.name, lanes))
    }
}
