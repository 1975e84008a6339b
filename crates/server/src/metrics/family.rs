//! Every metric family: its type, name, labels and help text. The guide's page is generated from
//! this table.
//!
//! The `store` label is empty, and so left out, where there is only one store. To a query, an empty
//! label and a missing one are the same.

use prometheus_client::metrics::MetricType;

/// A family of series with `N` labels.
pub(super) struct Family<const N: usize> {
    /// Without the `_total` of counters, which the format appends.
    pub(super) name: &'static str,
    pub(super) kind: MetricType,
    pub(super) labels: [&'static str; N],
    pub(super) help: &'static str,
}

macro_rules! families {
    ($($constant:ident: $kind:ident $name:literal [$($label:literal)*] $help:literal;)*) => {
        $(pub(super) const $constant: Family<{ <[&str]>::len(&[$($label),*]) }> =
            Family { name: $name, kind: MetricType::$kind, labels: [$($label),*], help: $help };)*

        /// The rows of the guide's table, in the order of the page.
        #[cfg(test)]
        pub(super) const ROWS: &[(&str, MetricType, &[&str], &str)] =
            &[$(($name, MetricType::$kind, &[$($label),*], $help),)*];
    };
}

families! {
    BUILD_INFO: Gauge "postbox_build_info" ["version"]
        "Which program this is; always 1.";
    STORE_UP: Gauge "postbox_store_up" ["store"]
        "Whether the store answered when it was asked last.";

    STATS_UP: Gauge "postbox_stats_up" ["store" "subscription"]
        "Whether the events of the subscription could be counted; if not, what is counted is missing here.";
    STATS_ESTIMATED: Gauge "postbox_stats_estimated" ["store" "subscription"]
        "Whether there was too much to count, so that pending events are estimated.";
    EVENTS: Gauge "postbox_events" ["store" "subscription" "state"]
        "Events by state; dispatched: since the subscription began; skipped: passed and not wanted, of what the log still has; too many to count are estimated.";
    OLDEST_PENDING: Gauge "postbox_oldest_pending_seconds" ["store" "subscription"]
        "Age of the oldest event that is not delivered.";
    PAUSED: Gauge "postbox_paused" ["store" "subscription"]
        "Whether a person paused the subscription.";
    DEPTH: Gauge "postbox_depth" ["store" "subscription" "topic"]
        "Events to be delivered, by topic.";
    LAG: Gauge "postbox_lag_seconds" ["store" "subscription" "topic"]
        "Age of the oldest event to be delivered, by topic.";
    UNROUTED: Gauge "postbox_unrouted_events" ["store" "log" "topic"]
        "Events that no subscription wants, by topic.";

    FETCHED: Counter "postbox_fetched" ["store" "subscription"]
        "Events read.";
    DELIVERED: Counter "postbox_delivered" ["store" "subscription"]
        "Events the destination has, duplicates included.";
    DELIVERED_BYTES: Counter "postbox_delivered_bytes" ["store" "subscription"]
        "Payloads of the events the destination has, in bytes.";
    DELIVERY_DELAY: Histogram "postbox_delivery_delay_seconds" ["store" "subscription"]
        "From the append of an event, or its deliver_at, to its delivery; without what is replayed.";
    CALL_DURATION: Histogram "postbox_call_duration_seconds" ["store" "subscription"]
        "How long calls of the destination take, whatever they end with; a call is one event or many.";
    IN_FLIGHT: Gauge "postbox_in_flight" ["store" "subscription"]
        "Events that the destination is being given now.";
    RETRIES: Counter "postbox_retries" ["store" "subscription"]
        "Attempts that failed and will be repeated.";
    DEAD: Counter "postbox_dead" ["store" "subscription"]
        "Events that died.";
    DEAD_LETTERS: Counter "postbox_dead_letters" ["store" "subscription"]
        "Dead events that the dead-letter sink has.";
    DEAD_LETTERS_FAILED: Counter "postbox_dead_letters_failed" ["store" "subscription"]
        "Dead events that the dead-letter sink did not take.";
    UNAVAILABLE: Counter "postbox_unavailable" ["store" "subscription"]
        "Deliveries that found the whole destination down.";
    BLOCKED: Counter "postbox_blocked" ["store" "subscription"]
        "Events put behind an earlier one of their key.";
    BATCHES: Counter "postbox_batches" ["store" "subscription"]
        "Batches settled.";
    STALE_WRITES: Counter "postbox_stale_writes" ["store" "subscription"]
        "Writes refused because the lane had another owner.";
    STORE_ERRORS: Counter "postbox_store_errors" ["store" "subscription"]
        "Calls to the store that failed and were repeated.";
    TIMEOUTS: Counter "postbox_timeouts" ["store" "subscription"]
        "Deliveries that exceeded the time limit.";
    BREAKER_OPENED: Counter "postbox_breaker_opened" ["store" "subscription"]
        "Times the breaker opened.";
    FAILURES: Counter "postbox_failures" ["store" "subscription" "topic" "code"]
        "Failed deliveries by topic and reason.";
    LEASE_RENEWALS: Counter "postbox_lease_renewals" ["store" "subscription" "result"]
        "Lease renewals by result.";
    LANES_HELD: Gauge "postbox_lanes_held" ["store" "subscription"]
        "Lanes this process drives now.";
    LANE_TAKEOVERS: Counter "postbox_lane_takeovers" ["store" "subscription"]
        "Lanes taken from a relay that vanished without giving them back: it crashed, or was away for longer than its lease.";
    LANE_FAILING: Gauge "postbox_lane_failing_since_seconds" ["store" "subscription" "lane" "code"]
        "When a lane began to fail at every read or settlement, in seconds since 1970; not there while it works.";
    BREAKER_STATE: Gauge "postbox_breaker_state" ["store" "subscription"]
        "How the destination stands: 0 answers, 1 is being asked again, 2 does not answer.";
    HIGH_WATER_MARK: Gauge "postbox_high_water_mark" ["subscription" "stream"]
        "Where a stream of the destination ends: JetStream's sequence, the milliseconds of Redis' id.";

    RECEIVED: Counter "postbox_received" ["store" "source" "result"]
        "Messages from outside by source and answer.";
    POISON: Counter "postbox_poison" ["store" "source"]
        "Messages of brokers that are kept because nobody can decode them.";
    SOURCE_ERRORS: Counter "postbox_source_errors" ["store" "source"]
        "Calls to a broker's source that failed and were repeated.";
    RECEIVE_ERRORS: Counter "postbox_receive_errors" ["store" "source"]
        "Messages of brokers that a call to the store failed to store.";
    HEADERS_DROPPED: Counter "postbox_headers_dropped" ["store" "source"]
        "Headers of messages from outside that were not kept: an event has no room for them.";
    DUPLICATES: Counter "postbox_duplicates" ["store" "layer" "source" "subscription"]
        "Repetitions by the layer that recognised them (timestamp: signed too long ago, inbox: id known, destination: it said so, which alone has a subscription) and by source.";
}
