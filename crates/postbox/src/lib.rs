//! Make a database commit and the messages about it one fact: transactional outbox, verified inbox, event bus.
