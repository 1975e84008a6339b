-- Every object lives in the configured schema. The placeholders in braces are the quoted schema,
-- the same as a string literal, a dollar-quote tag that does not occur in it, and operators of
-- Postgres. None may stand in a comment, which a line break in a name would end.
--
-- Nothing here depends on the caller's settings. Anyone who may create objects in a schema of a
-- caller's search_path could plant a function or an operator that fits our arguments better than
-- Postgres's own, and it would run with the caller's rights. So every function sets its
-- search_path, with `pg_temp` last: types and tables there come first if it is not named. If that
-- would cost too much, because the function is called for every row or inlined, it qualifies every
-- name instead, or is parsed when it is created (RETURN instead of a text). A backslash in a
-- literal is written in E'', which means the same under every setting.

-- Time-ordered ids for writers that bring none, as in most SQL: 48 bits of milliseconds, 12 bits of
-- the fraction of the millisecond, 62 random bits. One expression without a FROM: such a function
-- is inlined, and costs a tenth of a function call.
CREATE FUNCTION {s}.uuid_v7() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN (overlay(lpad(to_hex(floor(extract(epoch FROM clock_timestamp()) * 4096000)::bigint), 15, '0') PLACING '7' FROM 13 FOR 0)
  || right(replace(gen_random_uuid()::text, '-', ''), 16))::uuid;

-- The id that belongs to an idempotency key, equal to EventId::from_key. NULL is refused, because
-- it would give no id, and an event without an id is appended every time. A blank key is refused,
-- because all producers that had nothing to put in would share it.
CREATE FUNCTION {s}.event_id(key text) RETURNS uuid LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS ${tag}$
DECLARE
  digits text := left(encode(sha256(convert_to(key, 'UTF8')), 'hex'), 32);
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION 'the idempotency key is NULL' USING ERRCODE = 'null_value_not_allowed',
      HINT = 'name the event, e.g. order-42-paid; a text with NULL in it is NULL';
  ELSIF btrim(key, E' \t\n\f\r') = '' THEN
    RAISE EXCEPTION 'the idempotency key is blank' USING ERRCODE = 'invalid_parameter_value', HINT = 'name the event, e.g. order-42-paid';
  END IF;
  RETURN overlay(overlay(digits PLACING '8' FROM 13) PLACING translate(substr(digits, 17, 1), '0123456789abcdef', '89ab89ab89ab89ab') FROM 17)::uuid;
END
${tag}$;

-- The rule that the headers break, or NULL. The inbox's header for the sender's id does not count.
CREATE FUNCTION {s}.headers_fault(headers jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  IF jsonb_typeof(headers) <> 'object' THEN RETURN 'headers_invalid'; END IF;
  RETURN (SELECT CASE
      WHEN bool_or(h.kind <> 'string') THEN 'headers_invalid'
      WHEN count(*) FILTER (WHERE h.counts) > 64 THEN 'headers_too_many'
      WHEN sum(octet_length(h.name) + octet_length(h.value)) FILTER (WHERE h.counts) > 16384 THEN 'headers_too_large'
      WHEN bool_or(h.name COLLATE "C" !~ '^[A-Za-z0-9!#$%&''*+.^_`|~-]+$') THEN 'header_name_invalid'
      WHEN bool_or(h.value COLLATE "C" ~ E'[\\u0001-\\u0008\\u000a-\\u001f\\u007f-\\u009f]') THEN 'header_value_invalid'
    END
    FROM (SELECT e.key AS name, e.value #>> '{}' AS value, jsonb_typeof(e.value) AS kind,
        e.key <> 'postbox-message-id' OR octet_length(e.value #>> '{}') > 255 AS counts FROM jsonb_each(headers) AS e) AS h);
END
${tag}$;

-- Whether a row of a log keeps every rule of an event; if not, the error names the broken one as
-- its constraint: the stable codes of postbox_core::limits, so that an INSERT typed into psql is
-- refused with the same word as an append from Rust. `numbers` is the sequence of the log.
--
-- Whatever the store goes by must come from the store. A row with the id of another transaction
-- would never be found, or would stop the log; one with a place of tomorrow would take it from
-- somebody else. What a replica applies was checked where it was written.
--
-- One CHECK that hands over the row, and not one for each rule: Postgres reads every CHECK of a
-- table anew for every statement, which for a single row was half of its cost.
CREATE FUNCTION {s}.event_is_valid(event record, numbers regclass) RETURNS boolean LANGUAGE plpgsql STABLE AS ${tag}$
DECLARE
  fault pg_catalog.text;
BEGIN
  -- What is always there, then what often is not: an expression that is not reached costs nothing.
  fault := CASE
    WHEN event.xid {<>} pg_catalog.pg_current_xact_id() THEN
      CASE WHEN pg_catalog.current_setting('session_replication_role') {<>} 'replica' THEN 'xid_forged' END
    WHEN event.seq {<=} 0 OR event.seq {>} pg_catalog.currval(numbers) THEN 'seq_forged'
    WHEN event.created_at {<} '2000-01-01 00:00:00+00' OR event.created_at {>} (pg_catalog.statement_timestamp() {+} INTERVAL '24:00:00')
      THEN 'created_at_invalid'
    WHEN event.topic {=} '' THEN 'topic_empty'
    WHEN pg_catalog.octet_length(event.topic) {>} 255 THEN 'topic_too_long'
    WHEN event.topic COLLATE pg_catalog."C" {~}
      E'[\\u0001-\\u0020\\u007f-\\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]' THEN 'topic_invalid'
    WHEN pg_catalog.num_nonnulls(event.payload, event.payload_bytes) {<>} 1 THEN 'payload_missing'
    WHEN coalesce(pg_catalog.octet_length(event.payload), pg_catalog.octet_length(event.payload_bytes)) {>} 16777216 THEN 'payload_too_large'
    WHEN pg_catalog.left(event.payload, 2) {=} E'\\x' THEN 'payload_is_bytes'
    WHEN event.occurred_at {<} '0001-01-01 00:00:00+00' OR event.occurred_at {>=} '9999-12-30 22:00:01+00' THEN 'occurred_at_invalid'
    WHEN event.key {=} '' THEN 'key_empty'
    WHEN pg_catalog.octet_length(event.key) {>} 1024 THEN 'key_too_long'
    WHEN event.deliver_at IS NOT NULL OR event.expires_at IS NOT NULL THEN CASE
      WHEN event.deliver_at {<} '1970-01-01 00:00:00+00' OR event.deliver_at {>=} '9999-12-30 22:00:01+00' THEN 'deliver_at_invalid'
      WHEN event.expires_at {<} '1970-01-01 00:00:00+00' OR event.expires_at {>=} '9999-12-30 22:00:01+00' THEN 'expires_at_invalid'
      WHEN event.expires_at {<=} event.deliver_at THEN 'expires_too_early'
    END
  END;
  IF fault IS NULL AND (event.source IS NOT NULL OR event.content_type IS NOT NULL) THEN
    fault := CASE
      WHEN pg_catalog.octet_length(event.source) {<} 1 OR pg_catalog.octet_length(event.source) {>} 128
        OR event.source COLLATE pg_catalog."C" {~} E'[\\u0001-\\u001f\\u007f-\\u009f]' THEN 'source_invalid'
      WHEN pg_catalog.octet_length(event.content_type) {<} 1 OR pg_catalog.octet_length(event.content_type) {>} 128
        OR event.content_type COLLATE pg_catalog."C" {~} E'[\\u0001-\\u001f\\u007f-\\u009f]' THEN 'content_type_invalid'
    END;
  END IF;
  IF fault IS NULL AND (event.aggregate IS NOT NULL OR event.kind IS NOT NULL OR event.tenant IS NOT NULL) THEN
    fault := CASE
      WHEN pg_catalog.octet_length(event.aggregate) {<} 1 OR pg_catalog.octet_length(event.aggregate) {>} 128
        OR event.aggregate COLLATE pg_catalog."C" {~} E'[\\u0001-\\u001f\\u007f-\\u009f]' THEN 'aggregate_invalid'
      WHEN pg_catalog.octet_length(event.kind) {<} 1 OR pg_catalog.octet_length(event.kind) {>} 128
        OR event.kind COLLATE pg_catalog."C" {~} E'[\\u0001-\\u001f\\u007f-\\u009f]' THEN 'kind_invalid'
      WHEN event.tenant {=} '' THEN 'tenant_empty'
      WHEN pg_catalog.octet_length(event.tenant) {>} 128 THEN 'tenant_too_long'
      WHEN event.tenant COLLATE pg_catalog."C" {~} E'[\\u0001-\\u001f\\u007f-\\u009f]' THEN 'tenant_invalid'
    END;
  END IF;
  -- What nearly all headers are, by a look that costs a tenth: an object of texts under good names,
  -- with nothing in them that JSON escapes; and in 576 bytes there is no room for a 65th header, of
  -- which each takes 9 at least.
  IF fault IS NULL AND event.headers IS NOT NULL
     AND NOT (pg_catalog.octet_length(event.headers::pg_catalog.text) {<=} 576 AND event.headers::pg_catalog.text COLLATE pg_catalog."C" {~}
       E'^\\{("[A-Za-z0-9!#$%&''*+.^_`|~-]+": "[^"\\\\\\u007f-\\u009f]*"(, )?)*\\}$') THEN
    fault := {s}.headers_fault(event.headers);
  END IF;
  IF fault IS NULL THEN RETURN true; END IF;
  IF pg_catalog.left(fault, 6) {=} 'header' THEN
    RAISE EXCEPTION 'the event breaks the rule %', fault USING ERRCODE = 'check_violation', CONSTRAINT = fault,
      HINT = 'headers are one JSON object of text values: at most 64, 16 KiB together, RFC 9110 names, no control characters';
  END IF;
  IF fault {=} 'xid_forged' OR fault {=} 'seq_forged' THEN
    RAISE EXCEPTION 'the event breaks the rule %', fault USING ERRCODE = 'check_violation', CONSTRAINT = fault,
      HINT = 'xid and seq are the store''s own: leave both to their defaults, and never change a row of a log';
  END IF;
  RAISE EXCEPTION 'the event breaks the rule %', fault USING ERRCODE = 'check_violation', CONSTRAINT = fault, HINT = CASE
    WHEN fault {=} 'topic_too_long' THEN pg_catalog.concat('the topic has ', pg_catalog.octet_length(event.topic), ' bytes; at most 255 are allowed')
    WHEN fault {=} 'key_too_long' THEN pg_catalog.concat('the key has ', pg_catalog.octet_length(event.key), ' bytes; at most 1024 are allowed')
    WHEN fault {=} 'tenant_too_long' THEN pg_catalog.concat('the tenant has ', pg_catalog.octet_length(event.tenant), ' bytes; at most 128 are allowed')
    WHEN fault {=} 'payload_too_large' THEN pg_catalog.concat('the payload has ',
      coalesce(pg_catalog.octet_length(event.payload), pg_catalog.octet_length(event.payload_bytes)),
      ' bytes; at most 16777216 are allowed: keep what is larger elsewhere, and its address in the event')
    WHEN fault {=} 'payload_missing' THEN 'set one of payload (text) and payload_bytes, and not both'
    WHEN fault {=} 'payload_is_bytes' THEN 'put bytes into payload_bytes; enqueue takes both, and text that begins like this'
    WHEN fault {=} 'topic_invalid' THEN 'a topic has no white space and no control characters'
    WHEN fault {=} 'topic_empty' THEN 'say what happened, e.g. order.placed'
    WHEN fault {=} 'key_empty' OR fault {=} 'tenant_empty' THEN 'leave it out where there is none'
    WHEN fault {=} 'tenant_invalid' THEN 'a tenant has no control characters'
    WHEN fault {=} 'created_at_invalid' THEN 'leave created_at to its default'
    WHEN fault {=} 'occurred_at_invalid' THEN 'a time from the year 1 to the last days of 9999, and not infinity'
    WHEN fault {=} 'deliver_at_invalid' OR fault {=} 'expires_at_invalid' THEN 'a time from 1970 to the last days of 9999, and not infinity'
    WHEN fault {=} 'expires_too_early' THEN pg_catalog.concat('the event ends at ', event.expires_at, ' and may not go out before ', event.deliver_at,
      ': nobody would get it; let it end later, or leave one of them out')
    WHEN fault {=} 'source_invalid' THEN pg_catalog.concat('1 to 128 bytes without control characters; the source has ', pg_catalog.octet_length(event.source))
    WHEN fault {=} 'kind_invalid' THEN pg_catalog.concat('1 to 128 bytes without control characters; the kind has ', pg_catalog.octet_length(event.kind))
    WHEN fault {=} 'aggregate_invalid' THEN
      pg_catalog.concat('1 to 128 bytes without control characters; the aggregate has ', pg_catalog.octet_length(event.aggregate))
    ELSE pg_catalog.concat('1 to 128 bytes without control characters; the content type has ', pg_catalog.octet_length(event.content_type)) END;
END
${tag}$;

CREATE TABLE {s}.log (
  name text PRIMARY KEY,
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  -- How far events were checked for routing, in the order (xid, seq).
  routed_xid xid8 NOT NULL DEFAULT '0',
  routed_seq bigint NOT NULL DEFAULT 0,
  -- Events that this snapshot sees had a reader that took everything, even if it is removed by now.
  taken_snap pg_snapshot NOT NULL DEFAULT '1:1:',
  -- New lanes begin with this epoch: no lease of an earlier subscription of the name is valid.
  epoch_next bigint NOT NULL DEFAULT 0,
  -- Retention found no event before this place. An event whose transaction lasted longer than
  -- events are kept can still appear there, so only counts begin here; what decides about events
  -- looks at all of them.
  kept_from bigint NOT NULL DEFAULT 1
);

-- Adds the rules to a log. NOT VALID: new rows are still checked, but a dump restores such a
-- constraint after the data, so that rows come back with the ids of their own transactions.
CREATE FUNCTION {s}.guard_log(log_name text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  EXECUTE 'ALTER TABLE ' || {schema_literal} || '.' || quote_ident(log_name) || ' ADD CONSTRAINT event_invalid CHECK ('
    || {schema_literal} || '.event_is_valid(' || quote_ident(log_name) || ', '
    || quote_literal(({schema_literal} || '.' || log_name || '_seq_seq')::regclass::text) || '::regclass)) NOT VALID';
END
${tag}$;

-- Creates a log: one append-only table. Idempotent.
--
-- Two payload columns, of which exactly one is set. `payload` is text, so that an INSERT from psql
-- or any driver keeps JSON byte for byte. In a bytea column a plain literal would go through
-- bytea's own escapes ('"\\"' would lose a backslash, '"\n"' would be refused). A bytea value
-- assigned to `payload` by mistake arrives as '\x...', which a rule of its own refuses.
--
-- `xid` is the transaction that wrote the row, which the cursor, a snapshot, is compared with.
CREATE FUNCTION {s}.create_log(log_name text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  -- Of two at once, the second waits and then finds the log. Only the owner may lock the table.
  IF NOT EXISTS (SELECT FROM {s}.log WHERE name = log_name) THEN LOCK {s}.log IN SHARE ROW EXCLUSIVE MODE; END IF;
  IF EXISTS (SELECT FROM {s}.log WHERE name = log_name) THEN
    IF to_regclass({schema_literal} || '.' || quote_ident(log_name)) IS NULL THEN
      RAISE EXCEPTION 'schema % has no table %', {schema_literal}, log_name USING ERRCODE = 'PB003',
        HINT = 'if it was moved, run: ALTER TABLE OTHER.' || quote_ident(log_name) || ' SET SCHEMA ' || {schema_literal} || '; if it was dropped, restore a backup';
    END IF;
    RETURN;
  END IF;
  -- `create` is reserved because of `create_window`. Names of existing objects are taken.
  IF log_name !~ '^[a-z][a-z0-9_]{0,39}$' OR log_name = 'create' OR EXISTS (
      SELECT FROM unnest(ARRAY['', '_state', '_dead', '_seq_seq', '_pkey', '_id_key', '_xid_seq']) AS made(suffix)
      WHERE to_regclass({schema_literal} || '.' || quote_ident(log_name || made.suffix)) IS NOT NULL) THEN
    RAISE EXCEPTION '% is not a valid log name', quote_literal(log_name) USING ERRCODE = 'check_violation', CONSTRAINT = 'log_name_invalid',
      HINT = 'lower-case letters, digits and _, beginning with a letter, at most 40, and no table of Postbox itself';
  END IF;
  EXECUTE replace(${tag}_ddl$
    CREATE TABLE {s}."{tag}_log" (
      seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
      xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
      id uuid NOT NULL DEFAULT {s}.uuid_v7() UNIQUE,
      topic text NOT NULL,
      key text,
      aggregate text,
      version bigint,
      kind text,
      source text,
      tenant text,
      payload text,
      payload_bytes bytea,
      content_type text,
      headers jsonb,
      occurred_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      deliver_at timestamptz,
      expires_at timestamptz,
      slot smallint NOT NULL GENERATED ALWAYS AS ((hashtextextended(coalesce(key, id::text) COLLATE "C", 0) & 32767)::smallint) STORED
    );
    CREATE INDEX {tag}_log_xid_seq ON {s}."{tag}_log" (xid, seq);
    -- The CHECK of every writer reads the last number drawn; this allows no drawing.
    GRANT SELECT ON SEQUENCE {s}.{tag}_log_seq_seq TO PUBLIC;
  ${tag}_ddl$, '{tag}_log', log_name);
  PERFORM {s}.guard_log(log_name);
  PERFORM {s}.create_window(log_name);
  PERFORM {s}.create_append(log_name);
  PERFORM {s}.create_receive(log_name);
  PERFORM {s}.create_depth(log_name);
  PERFORM {s}.create_views(log_name);
  -- With row-level security, nobody sees a new log before its policies are added.
  IF (SELECT c.relrowsecurity FROM pg_class AS c WHERE c.oid = ({schema_literal} || '.log')::regclass) THEN
    EXECUTE 'ALTER TABLE ' || {schema_literal} || '.' || quote_ident(log_name) || ' ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY';
  END IF;
  INSERT INTO {s}.log (name) VALUES (log_name);
END
${tag}$;

CREATE TABLE {s}.subscription (
  id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text NOT NULL UNIQUE,
  log text NOT NULL REFERENCES {s}.log (name),
  topics text[] NOT NULL CHECK (CASE WHEN array_ndims(topics) > 1 THEN false ELSE array_position(topics, NULL) IS NULL END),
  kinds text[] NOT NULL DEFAULT '{}' CHECK (CASE WHEN array_ndims(kinds) > 1 THEN false ELSE array_position(kinds, NULL) IS NULL END),
  aggregates text[] NOT NULL DEFAULT '{}' CHECK (CASE WHEN array_ndims(aggregates) > 1 THEN false ELSE array_position(aggregates, NULL) IS NULL END),
  headers jsonb,
  tenant text,
  -- It had another tenant before, or none: what it has stored is not of its tenant alone.
  mixed boolean NOT NULL DEFAULT false,
  ordering text NOT NULL CHECK (ordering IN ('key', 'none')),
  on_dead text NOT NULL DEFAULT 'continue' CHECK (on_dead IN ('continue', 'halt')),
  lanes smallint NOT NULL CHECK (lanes BETWEEN 1 AND 256),
  -- Raised by every change of the filter, which a relay then reloads before it reads on.
  revision int NOT NULL DEFAULT 1,
  -- The revision of the filter that was compared with unrouted events, and how far.
  rerouted int NOT NULL DEFAULT 0,
  rerouted_seq bigint NOT NULL DEFAULT 0,
  -- The highest replay that any of its events had. The next one is a number that no destination has
  -- seen. One tenant's role may write it, so it has a bound, at which no statement overflows.
  replays int NOT NULL DEFAULT 0 CHECK (replays BETWEEN 0 AND 2000000000),
  -- Since the last reset: up to which place events of the stream belong to which replay.
  again_seq bigint NOT NULL DEFAULT 0,
  again_replay int NOT NULL DEFAULT 0,
  -- Distinguishes it from earlier subscriptions with the same name.
  generation bigint NOT NULL DEFAULT 0,
  paused_by text CHECK (char_length(paused_by) <= 255),
  paused_why text CHECK (char_length(paused_why) <= 2048),
  paused_until timestamptz CHECK (paused_until > '-infinity' AND paused_until < '9999-12-30 22:00:01+00'),
  created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The cursor, rewritten once per batch. Free space in the page, and no index on the changing
-- columns, make every rewrite a cheap in-page (HOT) update.
CREATE TABLE {s}.lane (
  subscription int NOT NULL REFERENCES {s}.subscription (id) ON DELETE CASCADE,
  lane smallint NOT NULL,
  from_snap pg_snapshot NOT NULL,
  to_snap pg_snapshot NOT NULL,
  low bigint NOT NULL,
  high bigint NOT NULL,
  last_seq bigint NOT NULL,
  -- The revision of the filter that it reads with.
  revision int NOT NULL DEFAULT 1,
  -- Events ever delivered, as settled. One tenant's role may write it, so it is read up to a bound.
  delivered bigint NOT NULL DEFAULT 0,
  epoch bigint NOT NULL DEFAULT 0,
  owner text,
  lease_until timestamptz CHECK (lease_until > '-infinity' AND lease_until < '9999-12-30 22:00:01+00'),
  -- In microseconds. One that ends later was granted before the clock was set back, and is void.
  lease_ttl bigint NOT NULL DEFAULT 0 CHECK (lease_ttl BETWEEN 0 AND 3162240000000000),
  granted_at timestamptz NOT NULL DEFAULT '-infinity' CHECK (granted_at < '9999-12-30 22:00:01+00'),
  -- How many holders in a row crashed: they neither released the lane nor held it for long.
  crashes int NOT NULL DEFAULT 0,
  -- The cluster that the snapshots' transaction ids belong to.
  cluster bigint NOT NULL DEFAULT {s}.cluster_id(),
  PRIMARY KEY (subscription, lane)
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

-- Every filter that a subscription had, including the present one. Two revisions have no row and
-- want nothing: 0, for events before the subscription's start, and the one for events that a reset
-- skipped.
CREATE TABLE {s}.filter (
  subscription int NOT NULL REFERENCES {s}.subscription (id) ON DELETE CASCADE,
  revision int NOT NULL,
  topics text[] NOT NULL,
  kinds text[] NOT NULL DEFAULT '{}',
  aggregates text[] NOT NULL DEFAULT '{}',
  headers jsonb,
  tenant text,
  PRIMARY KEY (subscription, revision)
);

-- How far a lane came with a filter: its cursor when it took over the next filter, and which of how
-- many lanes it was.
CREATE TABLE {s}.passage (
  subscription int NOT NULL REFERENCES {s}.subscription (id) ON DELETE CASCADE,
  revision int NOT NULL,
  lanes smallint NOT NULL,
  lane smallint NOT NULL,
  from_snap pg_snapshot NOT NULL,
  to_snap pg_snapshot NOT NULL,
  last_seq bigint NOT NULL,
  -- Events beyond this place count as not passed, because a reset took them back.
  seq_max bigint NOT NULL DEFAULT 9223372036854775807,
  PRIMARY KEY (subscription, revision, lanes, lane)
);

-- Skipped events that were sent later: by a replay, or because they had been unrouted.
CREATE TABLE {s}.sent (
  subscription int NOT NULL REFERENCES {s}.subscription (id) ON DELETE CASCADE,
  seq bigint NOT NULL,
  PRIMARY KEY (subscription, seq)
);

-- Events that no subscription of their log wants.
CREATE TABLE {s}.unrouted (
  log text NOT NULL REFERENCES {s}.log (name),
  seq bigint NOT NULL,
  PRIMARY KEY (log, seq)
);

CREATE TABLE {s}.replica (
  subscription int NOT NULL REFERENCES {s}.subscription (id) ON DELETE CASCADE,
  owner text NOT NULL,
  alive_until timestamptz NOT NULL CHECK (alive_until > '-infinity' AND alive_until < '9999-12-30 22:00:01+00'),
  -- Like `lease_ttl` of a lane.
  alive_ttl bigint NOT NULL CHECK (alive_ttl BETWEEN 0 AND 3162240000000000),
  PRIMARY KEY (subscription, owner)
) WITH (fillfactor = 50);

-- Delivery rows: events that left the stream. `ordered`: the subscription was ordered by key when
-- the row was added. A row that `holds` keeps later events of its key from being sent; among such
-- rows of a key, only the first can become due.
CREATE TABLE {s}.delivery (
  subscription int NOT NULL REFERENCES {s}.subscription (id) ON DELETE CASCADE,
  seq bigint NOT NULL,
  lane smallint NOT NULL,
  key text CHECK (octet_length(key) <= 1024),
  state text NOT NULL CONSTRAINT state_unknown CHECK (state IN ('retrying', 'blocked', 'scheduled', 'dead', 'discarded')),
  ordered boolean NOT NULL,
  halt boolean NOT NULL DEFAULT false,
  holds boolean NOT NULL GENERATED ALWAYS AS
    (ordered AND key IS NOT NULL AND (state IN ('retrying', 'blocked') OR (state = 'dead' AND halt))) STORED,
  attempts int NOT NULL DEFAULT 0,
  replays int NOT NULL DEFAULT 0 CHECK (replays BETWEEN 0 AND 2000000000),
  -- How many relays crashed while they sent it alone.
  crashes int NOT NULL DEFAULT 0,
  due_at timestamptz CHECK (due_at > '-infinity' AND due_at < '9999-12-30 22:00:01+00'),
  code text CHECK (char_length(code) <= 128),
  error text CHECK (char_length(error) <= 2048),
  updated_at timestamptz NOT NULL DEFAULT clock_timestamp() CHECK (updated_at > '-infinity' AND updated_at < '9999-12-30 22:00:01+00'),
  -- The last 8 failed attempts.
  last_attempts jsonb NOT NULL DEFAULT '[]' CHECK (octet_length(last_attempts::text) <= 32768),
  -- The last death that was handed to a dead-letter sink, counted from 1. While this is at most
  -- `replays`, a dead event still has a letter to hand over, at `letter_at`.
  letters int NOT NULL DEFAULT 0,
  letter_at timestamptz NOT NULL DEFAULT '-infinity',
  PRIMARY KEY (subscription, seq),
  CONSTRAINT due_when_waiting CHECK (CASE state WHEN 'scheduled' THEN due_at IS NOT NULL WHEN 'retrying' THEN true ELSE due_at IS NULL END)
);
CREATE INDEX delivery_due ON {s}.delivery (subscription, lane, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX delivery_held ON {s}.delivery (subscription, key, seq) WHERE holds;
CREATE INDEX delivery_held_lane ON {s}.delivery (subscription, lane) WHERE holds;
CREATE INDEX delivery_mark ON {s}.delivery (subscription, lane, seq) WHERE state = 'discarded' OR state = 'dead' AND code = 'marked_dead';
CREATE INDEX delivery_in_flight ON {s}.delivery (subscription, lane) WHERE code IN ('in_flight', 'alone');
CREATE INDEX delivery_letter ON {s}.delivery (subscription, lane, letter_at, seq) WHERE state = 'dead' AND letters <= replays;
CREATE INDEX delivery_missing ON {s}.delivery (subscription) WHERE code = 'event_missing';
CREATE INDEX delivery_state ON {s}.delivery (subscription, state, seq);

-- Receipts of received messages. Compared byte by byte, because an operating system that changes
-- the sort order of a language would otherwise corrupt the index. The id comes first, because it
-- alone distinguishes most keys. After columns that are the same in all keys, each step of an index
-- lookup compared three columns, which was a tenth of the cost of receiving.
CREATE TABLE {s}.receipt (
  source text COLLATE "C" NOT NULL,
  tenant text COLLATE "C" NOT NULL DEFAULT '',
  message_id text COLLATE "C" NOT NULL,
  digest bytea NOT NULL,
  received_at timestamptz NOT NULL DEFAULT clock_timestamp() CHECK (received_at > '-infinity' AND received_at < '9999-12-30 22:00:01+00'),
  PRIMARY KEY (message_id, source, tenant),
  CONSTRAINT message_id_invalid CHECK (octet_length(message_id) BETWEEN 1 AND 255)
);
CREATE INDEX receipt_received ON {s}.receipt (received_at);

-- Message ids that consumers with their own receive loop have applied. Separate from the receipts,
-- because a received message is not applied yet. The tenant is the one that the transaction named,
-- if any: what was applied for one tenant says nothing about another.
CREATE TABLE {s}.once (
  source text COLLATE "C" NOT NULL,
  tenant text COLLATE "C" NOT NULL DEFAULT coalesce(current_setting('postbox.tenant', true), ''),
  message_id text COLLATE "C" NOT NULL,
  seen_at timestamptz NOT NULL DEFAULT clock_timestamp() CHECK (seen_at > '-infinity' AND seen_at < '9999-12-30 22:00:01+00'),
  PRIMARY KEY (source, tenant, message_id),
  CONSTRAINT message_id_invalid CHECK (octet_length(message_id) BETWEEN 1 AND 255)
);
CREATE INDEX once_seen ON {s}.once (seen_at);

CREATE TABLE {s}.conflict (
  source text COLLATE "C" NOT NULL,
  tenant text COLLATE "C" NOT NULL,
  message_id text COLLATE "C" NOT NULL,
  digest_stored bytea NOT NULL,
  digest_refused bytea NOT NULL,
  times bigint NOT NULL DEFAULT 1,
  -- The same moment for both: the clock advances between two defaults.
  first_at timestamptz NOT NULL DEFAULT statement_timestamp() CHECK (first_at > '-infinity' AND first_at < '9999-12-30 22:00:01+00'),
  last_at timestamptz NOT NULL DEFAULT statement_timestamp() CHECK (last_at > '-infinity' AND last_at < '9999-12-30 22:00:01+00'),
  PRIMARY KEY (source, tenant, message_id, digest_refused)
);
CREATE INDEX conflict_last ON {s}.conflict (last_at);

-- Refuses a payload that is declared as JSON and is not, before its receiver finds out. Only for
-- single events appended by `enqueue`; an INSERT is not parsed.
CREATE FUNCTION {s}.check_json(payload text, content_type text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS ${tag}$
DECLARE
  parsed pg_catalog.json;
BEGIN
  IF content_type IS NULL OR content_type COLLATE pg_catalog."C" {~} '(?i)^ *(application/json|[^;]*[+]json) *(;|$)' THEN
    BEGIN
      parsed := payload::pg_catalog.json;
    EXCEPTION WHEN data_exception THEN
      RAISE EXCEPTION 'the event breaks the rule payload_not_json' USING ERRCODE = 'check_violation', CONSTRAINT = 'payload_not_json',
        HINT = 'give JSON, or name its type, e.g. content_type => ''text/plain''';
    END;
  END IF;
  RETURN true;
END
${tag}$;

-- Appends one event in the caller's transaction, from any language. An untyped literal is text. An
-- event with an id is appended the way drivers do it, only once.
CREATE FUNCTION {s}.enqueue(
  topic text, payload text, key text DEFAULT NULL, id uuid DEFAULT NULL, aggregate text DEFAULT NULL, version bigint DEFAULT NULL,
  kind text DEFAULT NULL, source text DEFAULT NULL, tenant text DEFAULT NULL, content_type text DEFAULT NULL,
  headers jsonb DEFAULT NULL, occurred_at timestamptz DEFAULT NULL, deliver_at timestamptz DEFAULT NULL, expires_at timestamptz DEFAULT NULL,
  log text DEFAULT 'outbox'
) RETURNS uuid LANGUAGE plpgsql AS ${tag}$
DECLARE
  event_id pg_catalog.uuid := coalesce(enqueue.id, {s}.uuid_v7());
  -- A text that looks like bytea's output is still text, but the column cannot tell.
  bytes pg_catalog.bytea := CASE WHEN pg_catalog.left(enqueue.payload, 2) {=} E'\\x' THEN pg_catalog.convert_to(enqueue.payload, 'UTF8') END;
  checked boolean := {s}.check_json(enqueue.payload, enqueue.content_type);
  known boolean;
BEGIN
  IF enqueue.topic IS NULL THEN
    RAISE EXCEPTION 'the event has no topic' USING ERRCODE = 'not_null_violation', COLUMN = 'topic', HINT = 'name what happened, e.g. order.placed';
  END IF;
  IF enqueue.log {=} 'outbox' AND enqueue.id IS NULL THEN
    INSERT INTO {s}.outbox (id, topic, key, aggregate, version, kind, source, tenant, payload, payload_bytes, content_type, headers, occurred_at, deliver_at, expires_at)
    VALUES (event_id, enqueue.topic, enqueue.key, enqueue.aggregate, enqueue.version, enqueue.kind, enqueue.source, enqueue.tenant,
      CASE WHEN bytes IS NULL THEN enqueue.payload END, bytes, enqueue.content_type, CASE WHEN enqueue.headers {<>} '{}' THEN enqueue.headers END,
      coalesce(enqueue.occurred_at, pg_catalog.clock_timestamp()), enqueue.deliver_at, enqueue.expires_at);
  ELSE
    IF NOT EXISTS (SELECT FROM {s}.log AS l WHERE l.name {=} enqueue.log) THEN
      RAISE EXCEPTION 'there is no log %', pg_catalog.quote_literal(enqueue.log) USING ERRCODE = 'undefined_table', HINT = 'create it with create_log(name)';
    END IF;
    {enqueue_own_id}
    EXECUTE 'INSERT INTO ' {||} {schema_literal} {||} '.' {||} pg_catalog.quote_ident(enqueue.log)
      {||} ' (id, topic, key, aggregate, version, kind, source, tenant, payload, payload_bytes, content_type, headers, occurred_at, deliver_at, expires_at)'
      {||} ' VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)'
      USING event_id, enqueue.topic, enqueue.key, enqueue.aggregate, enqueue.version, enqueue.kind, enqueue.source, enqueue.tenant,
      CASE WHEN bytes IS NULL THEN enqueue.payload END, bytes, enqueue.content_type, CASE WHEN enqueue.headers {<>} '{}' THEN enqueue.headers END,
      coalesce(enqueue.occurred_at, pg_catalog.clock_timestamp()), enqueue.deliver_at, enqueue.expires_at;
  END IF;
  RETURN event_id;
END
${tag}$;

-- The same for jsonb. Its text is delivered.
CREATE FUNCTION {s}.enqueue(
  topic text, payload jsonb, key text DEFAULT NULL, id uuid DEFAULT NULL, aggregate text DEFAULT NULL, version bigint DEFAULT NULL,
  kind text DEFAULT NULL, source text DEFAULT NULL, tenant text DEFAULT NULL, content_type text DEFAULT NULL,
  headers jsonb DEFAULT NULL, occurred_at timestamptz DEFAULT NULL, deliver_at timestamptz DEFAULT NULL, expires_at timestamptz DEFAULT NULL,
  log text DEFAULT 'outbox'
) RETURNS uuid LANGUAGE sql
RETURN {s}.enqueue(topic, payload::text, key, id, aggregate, version, kind, source, tenant, content_type, headers, occurred_at, deliver_at, expires_at, log);

-- The same for bytes, as application/octet-stream unless the content type says otherwise.
CREATE FUNCTION {s}.enqueue(
  topic text, payload bytea, key text DEFAULT NULL, id uuid DEFAULT NULL, aggregate text DEFAULT NULL, version bigint DEFAULT NULL,
  kind text DEFAULT NULL, source text DEFAULT NULL, tenant text DEFAULT NULL, content_type text DEFAULT 'application/octet-stream',
  headers jsonb DEFAULT NULL, occurred_at timestamptz DEFAULT NULL, deliver_at timestamptz DEFAULT NULL, expires_at timestamptz DEFAULT NULL,
  log text DEFAULT 'outbox'
) RETURNS uuid LANGUAGE plpgsql AS ${tag}$
DECLARE
  event_id pg_catalog.uuid := coalesce(enqueue.id, {s}.uuid_v7());
  bytes pg_catalog.bytea := enqueue.payload;
  checked boolean := {s}.check_json(CASE WHEN enqueue.content_type {~~} '%json%' THEN pg_catalog.convert_from(enqueue.payload, 'UTF8') END, enqueue.content_type);
  known boolean;
BEGIN
  IF enqueue.topic IS NULL THEN
    RAISE EXCEPTION 'the event has no topic' USING ERRCODE = 'not_null_violation', COLUMN = 'topic', HINT = 'name what happened, e.g. order.placed';
  END IF;
  -- NULL means the default, because only the default was checked.
  content_type := coalesce(enqueue.content_type, 'application/octet-stream');
  IF NOT EXISTS (SELECT FROM {s}.log AS l WHERE l.name {=} enqueue.log) THEN
    RAISE EXCEPTION 'there is no log %', pg_catalog.quote_literal(enqueue.log) USING ERRCODE = 'undefined_table', HINT = 'create it with create_log(name)';
  END IF;
  {enqueue_own_id}
  EXECUTE 'INSERT INTO ' {||} {schema_literal} {||} '.' {||} pg_catalog.quote_ident(enqueue.log)
    {||} ' (id, topic, key, aggregate, version, kind, source, tenant, payload_bytes, content_type, headers, occurred_at, deliver_at, expires_at)'
    {||} ' VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)'
    USING event_id, enqueue.topic, enqueue.key, enqueue.aggregate, enqueue.version, enqueue.kind, enqueue.source, enqueue.tenant,
    enqueue.payload, enqueue.content_type, CASE WHEN enqueue.headers {<>} '{}' THEN enqueue.headers END, coalesce(enqueue.occurred_at, pg_catalog.clock_timestamp()), enqueue.deliver_at, enqueue.expires_at;
  RETURN event_id;
END
${tag}$;

-- The same with keys that are numbers or UUIDs, as most are.
DO ${tag}$
DECLARE
  of record;
BEGIN
  FOR of IN
    SELECT * FROM (VALUES ('text', 'NULL'), ('jsonb', 'NULL'), ('bytea', '''application/octet-stream''')) AS p(payload, content_type),
      (VALUES ('bigint'), ('uuid')) AS k(key)
  LOOP
    EXECUTE replace(replace(replace(${tag}_sql$
      CREATE FUNCTION {s}.enqueue(
        topic text, payload {tag}_payload, key {tag}_key, id uuid DEFAULT NULL, aggregate text DEFAULT NULL, version bigint DEFAULT NULL,
        kind text DEFAULT NULL, source text DEFAULT NULL, tenant text DEFAULT NULL, content_type text DEFAULT {tag}_type,
        headers jsonb DEFAULT NULL, occurred_at timestamptz DEFAULT NULL, deliver_at timestamptz DEFAULT NULL, expires_at timestamptz DEFAULT NULL,
        log text DEFAULT 'outbox'
      ) RETURNS uuid LANGUAGE sql
      RETURN {s}.enqueue(topic, payload, key::text, id, aggregate, version, kind, source, tenant, content_type, headers, occurred_at, deliver_at, expires_at, log)
    ${tag}_sql$, '{tag}_payload', of.payload), '{tag}_key', of.key), '{tag}_type', of.content_type);
  END LOOP;
END
${tag}$;

-- Relays that are asleep, for writers that wake them. Unlogged: a crash only costs a hint.
CREATE UNLOGGED TABLE {s}.sleeper (
  log text NOT NULL,
  owner text NOT NULL,
  asleep_until timestamptz NOT NULL,
  tenant text NOT NULL DEFAULT coalesce(current_setting('postbox.tenant', true), ''),
  PRIMARY KEY (log, owner)
);
