//! Lanes, windows, ordering, retry, breaker, drain and retention: the one machine behind outbox, inbox and bus.
