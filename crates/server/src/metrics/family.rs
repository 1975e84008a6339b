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
        "Whether the store answered the last query.";
    PART_FAILING: Gauge "postbox_part_failing_since_seconds" ["store" "part" "code"]
        "When retention (part retention) or the search for unrouted events (unrouted) began to fail at each try, in seconds since 1970; absent while it works.";

    STATS_UP: Gauge "postbox_stats_up" ["store" "subscription"]
        "Whether the events of the subscription could be counted; if not, its counts are missing.";
    STATS_ESTIMATED: Gauge "postbox_stats_estimated" ["store" "subscription"]
        "Whether pending events are estimated, because there are too many to count.";
    EVENTS: Gauge "postbox_events" ["store" "subscription" "state"]
        "Events by state; dispatched: since the subscription began; skipped: not wanted, of the events that the log still has; large counts are estimated.";
    OLDEST_PENDING: Gauge "postbox_oldest_pending_seconds" ["store" "subscription"]
        "Age of the oldest event that is not delivered; of a replayed one since its append.";
    PAUSED: Gauge "postbox_paused" ["store" "subscription"]
        "Whether the subscription is paused: by a person, or because its endpoint is gone (410).";
    DEPTH: Gauge "postbox_depth" ["store" "subscription" "topic"]
        "Events to be delivered, by topic.";
    LAG: Gauge "postbox_lag_seconds" ["store" "subscription" "topic"]
        "Age of the oldest event to be delivered, by topic; of a replayed one since its append.";
    UNROUTED: Gauge "postbox_unrouted_events" ["store" "log" "topic"]
        "Events that no subscription wants, by topic; of a log that no subscription reads all of them, as topic other.";

    FETCHED: Counter "postbox_fetched" ["store" "subscription"]
        "Events read.";
    DELIVERED: Counter "postbox_delivered" ["store" "subscription"]
        "Events delivered, duplicates included.";
    DELIVERED_BYTES: Counter "postbox_delivered_bytes" ["store" "subscription"]
        "Payload bytes of the events delivered.";
    DELIVERY_DELAY: Histogram "postbox_delivery_delay_seconds" ["store" "subscription"]
        "Time from the append of an event, or its deliver_at, to its delivery; without replays.";
    CALL_DURATION: Histogram "postbox_call_duration_seconds" ["store" "subscription"]
        "Duration of the calls to the destination, whatever their outcome; a call sends one event or many.";
    IN_FLIGHT: Gauge "postbox_in_flight" ["store" "subscription"]
        "Events being sent to the destination now.";
    RETRIES: Counter "postbox_retries" ["store" "subscription"]
        "Attempts that failed and will be repeated.";
    ATTEMPTS_OVER: Counter "postbox_attempts_over" ["store" "subscription" "over"]
        "Failed attempts beyond the first, fifth and tenth of an event (over 1, 5, 10).";
    DEAD: Counter "postbox_dead" ["store" "subscription"]
        "Events that died.";
    DEAD_LETTERS: Counter "postbox_dead_letters" ["store" "subscription"]
        "Dead events delivered to the dead-letter sink.";
    DEAD_LETTERS_FAILED: Counter "postbox_dead_letters_failed" ["store" "subscription"]
        "Dead events that the dead-letter sink did not accept.";
    UNAVAILABLE: Counter "postbox_unavailable" ["store" "subscription"]
        "Deliveries that failed because the whole destination was down.";
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
    WAITS: Gauge "postbox_waits_by_configuration" ["store" "subscription"]
        "1: events wait for a schedule, or for a destination to be configured; 0: they go out at once, or a scheduled run cannot go on.";
    LANE_TAKEOVERS: Counter "postbox_lane_takeovers" ["store" "subscription"]
        "Lanes taken from a relay that vanished without giving them back: it crashed, or was away for longer than its lease.";
    LANE_FAILING: Gauge "postbox_lane_failing_since_seconds" ["store" "subscription" "lane" "code"]
        "When a lane began to fail at every read or settlement, in seconds since 1970; absent while it works.";
    BREAKER_STATE: Gauge "postbox_breaker_state" ["store" "subscription"]
        "State of the destination: 0 answers, 1 is being tried again, 2 does not answer.";
    HIGH_WATER_MARK: Gauge "postbox_high_water_mark" ["subscription" "stream"]
        "End of a stream of the destination: JetStream's sequence, or the milliseconds of Redis' id.";

    RECEIVED: Counter "postbox_received" ["store" "source" "result"]
        "Messages received, by source and result.";
    POISON: Counter "postbox_poison" ["store" "source"]
        "Messages of brokers that cannot be decoded, and are kept.";
    SOURCE_ERRORS: Counter "postbox_source_errors" ["store" "source"]
        "Calls to a broker's source that failed and were repeated.";
    RECEIVE_ERRORS: Counter "postbox_receive_errors" ["store" "source"]
        "Messages of brokers that were not stored because a call to the store failed.";
    HEADERS_DROPPED: Counter "postbox_headers_dropped" ["store" "source"]
        "Headers of received messages that were dropped because an event has no room for them.";
    DUPLICATES: Counter "postbox_duplicates" ["store" "layer" "source" "subscription"]
        "Repetitions by source and by the layer that recognised them (timestamp: signed too long ago; inbox: known id; destination: its own report, with a subscription too).";
}
