//! The tables, as numbered migrations. They use plain SQL that SQLite 3.38 (the first with built-in
//! JSON) and later understand, so that any language's own SQLite can insert.

use jiff::Timestamp;
use postbox_core::LogName;
use postbox_core::limits::OCCURRED_AT_MIN;

/// A step of the schema. Never changed once released: corrections are new steps.
pub(crate) struct Migration {
    pub(crate) number: i64,
    pub(crate) name: &'static str,
    pub(crate) sql: fn() -> String,
}

/// Every step, in order.
pub(crate) const MIGRATIONS: [Migration; 1] = [Migration { number: 1, name: "0001_postbox", sql: postbox }];

/// The highest migration number that this program knows.
pub(crate) const VERSION: i64 = MIGRATIONS[MIGRATIONS.len() - 1].number;

/// Tables other than logs, without their prefix, in the order they are dropped.
pub(crate) const TABLES: [&str; 13] = [
    "delivery",
    "sent",
    "unrouted",
    "passage",
    "filter",
    "lane",
    "replica",
    "subscription",
    "receipt",
    "once",
    "conflict",
    "log",
    "migration",
];

/// Tables whose rows belong to a subscription, by its name.
pub(crate) const SUBSCRIPTION_TABLES: [&str; 6] = ["lane", "filter", "passage", "sent", "replica", "delivery"];

/// Microseconds since 1970 by SQLite's clock, exact to its millisecond; works in versions without
/// `subsec`.
pub(crate) const NOW_MICROS: &str =
    "(CAST(strftime('%s','now') AS INTEGER) * 1000000 + CAST(substr(strftime('%f','now'), 4, 3) AS INTEGER) * 1000)";

/// A version 7 UUID: 48 bits of milliseconds, then random bits.
const UUID_V7: &str = "(printf('%08x-%04x-7', (CAST(strftime('%s','now') AS INTEGER) * 1000 + CAST(substr(strftime('%f','now'), 4, 3) AS INTEGER)) >> 16, \
(CAST(strftime('%s','now') AS INTEGER) * 1000 + CAST(substr(strftime('%f','now'), 4, 3) AS INTEGER)) & 65535) \
|| substr(lower(hex(randomblob(2))), 2) || '-' || substr('89ab', (random() & 3) + 1, 1) || substr(lower(hex(randomblob(2))), 2) \
|| '-' || lower(hex(randomblob(6))))";

/// The table that records applied migrations. Created by `up` itself.
pub(crate) const MIGRATION_TABLE: &str = "CREATE TABLE IF NOT EXISTS postbox_migration (
  number     INTEGER PRIMARY KEY,
  name       TEXT    NOT NULL,
  applied_at INTEGER NOT NULL
);";

/// The statement that records a migration.
pub(crate) fn migration_insert(migration: &Migration) -> String {
    // Number and name are our own constants.
    format!(
        "INSERT INTO postbox_migration (number, name, applied_at) VALUES ({}, '{}', {NOW_MICROS});",
        migration.number, migration.name
    )
}

/// The table of a log: `postbox_outbox` for `outbox`.
pub(crate) fn log_table(log: &LogName) -> String {
    format!("postbox_{log}")
}

/// The table of a log.
///
/// - `seq` is commit order: SQLite has one writer at a time, and AUTOINCREMENT never assigns a
///   number twice. So the cursor is an integer.
/// - Every CHECK is named by the code that `NewEvent::validate` returns for the same fault, and
///   reports it for plain INSERTs.
/// - Times are whole microseconds since 1970, UTC. `occurred_at`, `deliver_at` and `expires_at` may
///   also be text that SQLite's date functions understand (`datetime('now', '+1 hour')`), UTC.
/// - A row with a `seq` of its own is refused: at or below a cursor it would never be sent. For a
///   row without one, NEW.seq is -1 in a BEFORE trigger.
/// - `payload` is the last column, so that statements without it read no overflow page.
pub(crate) fn log_ddl(log: &LogName) -> String {
    let table = log_table(log);
    let id_pattern = [8, 4, 4, 4, 12].map(|digits| "[0-9a-f]".repeat(digits)).join("-");
    let control = "'*[' || char(1, 45, 31, 127, 45, 159) || ']*'";
    // Control characters and every Unicode white space.
    let blank = "'*[' || char(1, 45, 32, 127, 45, 160, 5760, 8192, 45, 8202, 8232, 8233, 8239, 8287, 12288) || ']*'";
    let bytes = |column: &str| format!("length(CAST({column} AS BLOB))");
    let nul_free = |column: &str| format!("instr(CAST({column} AS BLOB), x'00') = 0");
    let is_text = |column: &str| format!("typeof({column}) IN ('text', 'null')");
    let name = |column: &str| {
        format!(
            "CONSTRAINT {column}_invalid CHECK ({} AND ({column} IS NULL OR {} BETWEEN 1 AND 128 AND {} AND {column} NOT GLOB {control}))",
            is_text(column),
            bytes(column),
            nul_free(column)
        )
    };
    let names = ["aggregate", "kind", "source", "content_type"].map(name).join(",\n  ");
    // What `NewEvent::validate` allows, up to the last time that this program can hold. Text is
    // converted by julianday when it is read.
    let time = |(column, least): (&str, Timestamp)| {
        let (least, day) = (least.as_microsecond(), 2_440_587.5 + (least.as_second() / 86_400) as f64);
        format!(
            "CONSTRAINT {column}_invalid CHECK ({column} IS NULL OR (typeof({column}) = 'integer' \
             AND {column} BETWEEN {least} AND 253402207200999999) \
             OR (typeof({column}) = 'text' AND julianday({column}) IS NOT NULL \
             AND julianday({column}) BETWEEN {day} AND 5373483.4166))"
        )
    };
    let due = Timestamp::UNIX_EPOCH;
    let times = [("occurred_at", OCCURRED_AT_MIN), ("deliver_at", due), ("expires_at", due)].map(time).join(",\n  ");
    // Exact if both are numbers, as in events that we append.
    let day = |column: &str| {
        format!(
            "CASE typeof({column}) WHEN 'text' THEN julianday({column}) ELSE 2440587.5 + {column} / 86400000000.0 END"
        )
    };
    let (later, end) = (day("deliver_at"), day("expires_at"));
    format!(
        "CREATE TABLE {table} (
  seq          INTEGER PRIMARY KEY AUTOINCREMENT,
  id           TEXT    NOT NULL DEFAULT {UUID_V7},
  topic        TEXT    NOT NULL,
  key          TEXT,
  aggregate    TEXT,
  version      INTEGER,
  kind         TEXT,
  source       TEXT,
  tenant       TEXT,
  content_type TEXT,
  headers      TEXT,
  occurred_at  INTEGER,
  created_at   INTEGER NOT NULL DEFAULT {NOW_MICROS},
  deliver_at   INTEGER,
  expires_at   INTEGER,
  payload      BLOB    NOT NULL,
  CONSTRAINT seq_given CHECK (seq > 0),
  CONSTRAINT event_id_invalid CHECK (typeof(id) = 'text' AND id GLOB '{id_pattern}' AND length(CAST(id AS BLOB)) = 36),
  CONSTRAINT topic_empty CHECK (topic <> ''),
  CONSTRAINT topic_too_long CHECK ({topic_bytes} <= 255),
  CONSTRAINT topic_invalid CHECK (typeof(topic) = 'text' AND {topic_nul_free} AND topic NOT GLOB {blank}),
  CONSTRAINT key_empty CHECK (key <> ''),
  CONSTRAINT key_too_long CHECK ({key_bytes} <= 1024),
  CONSTRAINT key_invalid CHECK ({key_is_text} AND (key IS NULL OR {key_nul_free})),
  CONSTRAINT tenant_empty CHECK (tenant <> ''),
  CONSTRAINT tenant_too_long CHECK ({tenant_bytes} <= 128),
  CONSTRAINT tenant_invalid CHECK ({tenant_is_text} AND (tenant IS NULL OR {tenant_nul_free} AND tenant NOT GLOB {control})),
  {names},
  CONSTRAINT version_invalid CHECK (typeof(version) IN ('integer', 'null')),
  CONSTRAINT payload_invalid CHECK (typeof(payload) IN ('blob', 'text')),
  CONSTRAINT payload_too_large CHECK ({payload_bytes} <= 16777216),
  CONSTRAINT headers_too_large CHECK ({headers_bytes} <= 131072),
  CONSTRAINT headers_invalid CHECK (headers IS NULL OR {headers_nul_free} AND CASE WHEN json_valid(headers) THEN json_type(headers) = 'object' ELSE 0 END),
  CONSTRAINT header_value_invalid CHECK (headers IS NULL OR (replace(headers, '\\\\', '') NOT GLOB '*\\[nrbf]*'
    AND lower(replace(headers, '\\\\', '')) NOT GLOB '*\\u000[0-8a-f]*'
    AND lower(replace(headers, '\\\\', '')) NOT GLOB '*\\u00[189]*' AND lower(replace(headers, '\\\\', '')) NOT GLOB '*\\u007f*'
    AND headers NOT GLOB '*[' || char(127, 45, 159) || ']*')),
  {times},
  CONSTRAINT expires_too_early CHECK (deliver_at IS NULL OR expires_at IS NULL OR CASE
    WHEN typeof(deliver_at) = 'integer' AND typeof(expires_at) = 'integer' THEN expires_at > deliver_at ELSE {end} > {later} END),
  CONSTRAINT created_at_invalid CHECK (typeof(created_at) = 'integer' AND created_at BETWEEN -377705023201000000 AND 253402207200999999)
);
CREATE UNIQUE INDEX {table}_id ON {table} (id);
CREATE TRIGGER {table}_seq BEFORE INSERT ON {table} WHEN NEW.seq <> -1 BEGIN
  SELECT RAISE(ABORT, 'seq_given: the database assigns seq; leave the column out');
END;
INSERT INTO postbox_log (name) VALUES ('{log}');\n",
        topic_bytes = bytes("topic"),
        topic_nul_free = nul_free("topic"),
        key_bytes = bytes("key"),
        key_is_text = is_text("key"),
        key_nul_free = nul_free("key"),
        tenant_bytes = bytes("tenant"),
        tenant_is_text = is_text("tenant"),
        tenant_nul_free = nul_free("tenant"),
        payload_bytes = bytes("payload"),
        headers_bytes = bytes("headers"),
        headers_nul_free = nul_free("headers"),
    )
}

fn postbox() -> String {
    let logs = [LogName::outbox(), LogName::inbox()].map(|log| log_ddl(&log)).concat();
    format!("{TABLES_0001}{logs}")
}

/// All tables except the logs.
const TABLES_0001: &str = "CREATE TABLE postbox_log (
  name       TEXT    PRIMARY KEY NOT NULL,
  routed     INTEGER NOT NULL DEFAULT 0,
  epoch_next INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE postbox_subscription (
  name         TEXT    PRIMARY KEY NOT NULL,
  log          TEXT    NOT NULL,
  topics       TEXT    NOT NULL,
  tenant       TEXT,
  kinds        TEXT    NOT NULL DEFAULT '[]',
  aggregates   TEXT    NOT NULL DEFAULT '[]',
  headers      TEXT    NOT NULL DEFAULT '{}',
  ordering     TEXT    NOT NULL CHECK (ordering IN ('key', 'none')),
  on_dead      TEXT    NOT NULL DEFAULT 'continue' CHECK (on_dead IN ('continue', 'halt')),
  lanes        INTEGER NOT NULL CHECK (lanes BETWEEN 1 AND 256),
  revision     INTEGER NOT NULL DEFAULT 1,
  rerouted     INTEGER NOT NULL DEFAULT 0,
  rerouted_seq INTEGER NOT NULL DEFAULT 0,
  replays      INTEGER NOT NULL DEFAULT 0,
  again_seq    INTEGER NOT NULL DEFAULT 0,
  again_replay INTEGER NOT NULL DEFAULT 0,
  generation   INTEGER NOT NULL,
  created_at   INTEGER NOT NULL,
  paused_by    TEXT,
  paused_why   TEXT,
  paused_until INTEGER
) WITHOUT ROWID;
CREATE TABLE postbox_lane (
  subscription TEXT    NOT NULL,
  lane         INTEGER NOT NULL,
  position     INTEGER NOT NULL,
  window_end   INTEGER NOT NULL,
  revision     INTEGER NOT NULL,
  delivered    INTEGER NOT NULL DEFAULT 0,
  epoch        INTEGER NOT NULL DEFAULT 0,
  owner        TEXT,
  lease_until  INTEGER NOT NULL DEFAULT 0,
  lease_ttl    INTEGER NOT NULL DEFAULT 0,
  granted_at   INTEGER NOT NULL DEFAULT 0,
  crashes      INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (subscription, lane)
) WITHOUT ROWID;
CREATE TABLE postbox_filter (
  subscription TEXT    NOT NULL,
  revision     INTEGER NOT NULL,
  topics       TEXT    NOT NULL,
  tenant       TEXT,
  kinds        TEXT    NOT NULL DEFAULT '[]',
  aggregates   TEXT    NOT NULL DEFAULT '[]',
  headers      TEXT    NOT NULL DEFAULT '{}',
  PRIMARY KEY (subscription, revision)
) WITHOUT ROWID;
CREATE TABLE postbox_passage (
  subscription TEXT    NOT NULL,
  revision     INTEGER NOT NULL,
  lanes        INTEGER NOT NULL,
  lane         INTEGER NOT NULL,
  position     INTEGER NOT NULL,
  PRIMARY KEY (subscription, revision, lanes, lane)
) WITHOUT ROWID;
CREATE TABLE postbox_sent (
  subscription TEXT    NOT NULL,
  seq          INTEGER NOT NULL,
  PRIMARY KEY (subscription, seq)
) WITHOUT ROWID;
CREATE TABLE postbox_unrouted (
  log TEXT    NOT NULL,
  seq INTEGER NOT NULL,
  PRIMARY KEY (log, seq)
) WITHOUT ROWID;
CREATE TABLE postbox_replica (
  subscription TEXT    NOT NULL,
  owner        TEXT    NOT NULL,
  seen_at      INTEGER NOT NULL,
  PRIMARY KEY (subscription, owner)
) WITHOUT ROWID;
CREATE TABLE postbox_delivery (
  subscription TEXT    NOT NULL,
  seq          INTEGER NOT NULL,
  lane         INTEGER NOT NULL,
  id           TEXT    NOT NULL,
  topic        TEXT    NOT NULL,
  key          TEXT,
  created_at   INTEGER NOT NULL,
  state        TEXT    NOT NULL CHECK (state IN ('retrying', 'blocked', 'scheduled', 'dead', 'discarded')),
  holds        INTEGER NOT NULL CHECK (holds IN (0, 1)),
  attempts     INTEGER NOT NULL,
  replays      INTEGER NOT NULL DEFAULT 0,
  crashes      INTEGER NOT NULL DEFAULT 0,
  due_at       INTEGER,
  code         TEXT,
  error        TEXT,
  updated_at   INTEGER NOT NULL,
  last_attempts TEXT   NOT NULL DEFAULT '[]',
  letters      INTEGER NOT NULL DEFAULT 0,
  letter_at    INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (subscription, seq),
  CONSTRAINT delivery_due CHECK (state NOT IN ('retrying', 'scheduled') OR due_at IS NOT NULL),
  CONSTRAINT delivery_holds CHECK (holds = 0 OR (key IS NOT NULL AND state IN ('retrying', 'blocked', 'dead'))),
  CONSTRAINT delivery_blocked CHECK (state <> 'blocked' OR holds = 1)
) WITHOUT ROWID;
CREATE INDEX postbox_delivery_due ON postbox_delivery (subscription, lane, due_at) WHERE state IN ('retrying', 'scheduled');
CREATE INDEX postbox_delivery_key ON postbox_delivery (subscription, key, seq) WHERE holds = 1;
CREATE INDEX postbox_delivery_in_flight ON postbox_delivery (subscription, lane) WHERE code IN ('in_flight', 'alone');
CREATE INDEX postbox_delivery_letter ON postbox_delivery (subscription, lane, letter_at, seq) WHERE state = 'dead' AND letters <= replays;
CREATE INDEX postbox_delivery_missing ON postbox_delivery (subscription) WHERE code = 'event_missing';
CREATE INDEX postbox_delivery_state ON postbox_delivery (subscription, state, seq);
CREATE TABLE postbox_receipt (
  source      TEXT    NOT NULL,
  tenant      TEXT    NOT NULL,
  message_id  TEXT    NOT NULL,
  digest      BLOB    NOT NULL,
  received_at INTEGER NOT NULL,
  PRIMARY KEY (source, tenant, message_id)
) WITHOUT ROWID;
CREATE INDEX postbox_receipt_age ON postbox_receipt (received_at);
CREATE TABLE postbox_once (
  source      TEXT    NOT NULL,
  message_id  TEXT    NOT NULL,
  seen_at     INTEGER NOT NULL,
  PRIMARY KEY (source, message_id)
) WITHOUT ROWID;
CREATE INDEX postbox_once_age ON postbox_once (seen_at);
CREATE TABLE postbox_conflict (
  source         TEXT    NOT NULL,
  tenant         TEXT    NOT NULL,
  message_id     TEXT    NOT NULL,
  digest_stored  BLOB    NOT NULL,
  digest_refused BLOB    NOT NULL,
  times          INTEGER NOT NULL,
  first_at       INTEGER NOT NULL,
  last_at        INTEGER NOT NULL,
  PRIMARY KEY (source, tenant, message_id, digest_refused)
) WITHOUT ROWID;
CREATE INDEX postbox_conflict_age ON postbox_conflict (last_at);
";
