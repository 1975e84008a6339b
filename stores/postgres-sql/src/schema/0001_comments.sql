-- What psql says of all this with `\d+` and `\df+`. The guide's tables are made of it.

-- Comments on a log and its views.
CREATE FUNCTION {s}.comment_log(log_name text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS ${tag}$
DECLARE
  c record;
BEGIN
  FOR c IN
    SELECT * FROM (VALUES
      ('', NULL, 'append-only: events in the order of their transactions. Append with enqueue or INSERT; never UPDATE'),
      ('', 'seq', 'the place in the log; set by the store'),
      ('', 'xid', 'the writing transaction; set by the store'),
      ('', 'id', 'the event''s id, the same at every attempt'),
      ('', 'topic', 'what happened, e.g. order.placed'),
      ('', 'key', 'events of one key arrive in the order of their commits'),
      ('', 'aggregate', 'the kind of thing that changed, e.g. order'),
      ('', 'version', 'the version of that thing'),
      ('', 'kind', 'a name for filters and handlers'),
      ('', 'source', 'the service that wrote it, or the source it was received from'),
      ('', 'tenant', 'the tenant; a subscription may be limited to one'),
      ('', 'payload', 'text, kept byte for byte; bytes that are not text go to payload_bytes'),
      ('', 'payload_bytes', 'the payload, if it is not text'),
      ('', 'content_type', 'NULL is application/json'),
      ('', 'headers', 'one JSON object of text values'),
      ('', 'occurred_at', 'when it happened'),
      ('', 'created_at', 'when it was appended; set by the store'),
      ('', 'deliver_at', 'not delivered before this time'),
      ('', 'expires_at', 'not delivered after this time'),
      ('', 'slot', 'decides the lane; set by the store'),
      ('_state', NULL, 'the state of each event, a row for each subscription of the log; select by id, or it reads the whole log'),
      ('_dead', NULL, 'events that wait for a person: retry or discard them'),
      ('_', 'subscription', 'the subscription of this delivery'),
      ('_', 'id', 'the id of the event, for retry and discard'),
      ('_', 'topic', 'what happened'),
      ('_', 'key', 'its key'),
      ('_', 'state', 'pending, retrying, blocked, scheduled, dead, discarded, dispatched, skipped or unrouted'),
      ('_', 'attempts', 'counted attempts since the last retry or replay'),
      ('_', 'replays', 'how often it was retried or replayed by a person'),
      ('_', 'due_at', 'the time of the next attempt'),
      ('_', 'code', 'the reason of the last failure'),
      ('_', 'error', 'the text of the last failure'),
      ('_', 'last_attempts', 'the last 8 failed calls: at, code, took_us, answer, next_at'),
      ('_', 'updated_at', 'when this last changed'),
      ('_', 'created_at', 'when the event was appended'),
      ('_', 'tenant', 'its tenant'),
      ('_', 'headers', 'its headers'),
      ('_', 'content_type', 'NULL is application/json'),
      ('_', 'payload', 'its payload, if it is text'),
      ('_', 'payload_bytes', 'its payload, if it is not text')) AS said(of, at, text)
    JOIN (VALUES (''), ('_state'), ('_dead')) AS made(suffix) ON made.suffix = said.of OR (said.of = '_' AND made.suffix <> '')
    CROSS JOIN LATERAL (SELECT to_regclass({schema_literal} || '.' || quote_ident(log_name || made.suffix)) AS relation) AS r
    JOIN pg_class AS p ON p.oid = r.relation
    WHERE said.at IS NULL OR EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = r.relation AND a.attname = said.at)
  LOOP
    EXECUTE CASE WHEN c.at IS NOT NULL THEN 'COMMENT ON COLUMN ' || c.relation || '.' || quote_ident(c.at)
      WHEN c.relkind = 'v' THEN 'COMMENT ON VIEW ' || c.relation ELSE 'COMMENT ON TABLE ' || c.relation END || ' IS ' || quote_literal(c.text);
  END LOOP;
END
${tag}$;

DO ${tag}$
DECLARE
  c record;
BEGIN
  FOR c IN
    SELECT p.oid::regprocedure AS signature, said.text FROM (VALUES
      ('enqueue', 'appends an event in your transaction and returns its id: topic, payload (text, jsonb or bytea), and other fields by name. If the log has the id already, a notice says so and nothing is appended'),
      ('event_id', 'returns the id of an idempotency key, which names the event, e.g. order-42-paid: the same key gives the same id, so the event is appended once'),
      ('retry', 'retries dead and retrying events of a subscription now; returns how many. At most 1000 ids per call'),
      ('discard', 'discards events that are not delivered yet, for good, and lets the next of their keys go; returns how many. At most 1000 ids per call'),
      ('mark_dead', 'marks events dead that are not delivered yet, with a reason: no further attempt until a retry; returns how many. At most 1000 ids per call'),
      ('pause', 'pauses a subscription, until a time or until somebody resumes it: why, until when, by whom (by default you)'),
      ('resume', 'resumes a paused subscription'),
      ('once', 'whether this message is seen for the first time, recorded in your transaction: do its work only if true'),
      ('receive', 'stores a verified message from outside once: accepted, duplicate (known with this payload) or conflict (known with another)'),
      ('depth', 'counts of a subscription by state and topic, age in microseconds; the view stats adds them up'),
      ('create_log', 'creates a log, unless it exists; for the owner'),
      ('notify_enable', 'lets the writers of a log wake relays; for the owner; a transaction that appends can then not be prepared (PREPARE TRANSACTION), because Postgres allows no NOTIFY in it'),
      ('notify_disable', 'ends notify_enable; for the owner'),
      ('guard_log', 'puts the checks back on a log''s rows, after they were removed; for the owner')) AS said(name, text)
    JOIN pg_proc AS p ON p.pronamespace = {schema_literal}::regnamespace AND p.proname = said.name
  LOOP
    EXECUTE 'COMMENT ON FUNCTION ' || c.signature || ' IS ' || quote_literal(c.text);
  END LOOP;
END
${tag}$;

COMMENT ON VIEW {s}.stats IS 'a row for each subscription; counts cost the same at any size of the log';
COMMENT ON COLUMN {s}.stats.subscription IS 'its name';
COMMENT ON COLUMN {s}.stats.log IS 'the log that it reads';
COMMENT ON COLUMN {s}.stats.pending IS 'everything still to be delivered: unread, retrying, blocked and scheduled';
COMMENT ON COLUMN {s}.stats.retrying IS 'part of pending: failed, will be retried';
COMMENT ON COLUMN {s}.stats.blocked IS 'part of pending: wait behind an earlier event of their key';
COMMENT ON COLUMN {s}.stats.scheduled IS 'part of pending: wait for their time';
COMMENT ON COLUMN {s}.stats.dead IS 'wait for a person';
COMMENT ON COLUMN {s}.stats.discarded IS 'never to be delivered: a person, or retention, discarded them';
COMMENT ON COLUMN {s}.stats.dispatched IS 'delivered since the subscription began';
COMMENT ON COLUMN {s}.stats.skipped IS 'passed and never sent, because the filter did not want them; of the events that the log still has';
COMMENT ON COLUMN {s}.stats.estimated IS 'whether there was too much to count: unread events are then estimated, other states are lower bounds. All subscriptions share 10000 events of each state, at least 500 for each';
COMMENT ON COLUMN {s}.stats.skipped_estimated IS 'whether skipped is an estimate: more events were passed than are counted';
COMMENT ON COLUMN {s}.stats.oldest_pending_seconds IS 'the lag: for how long the oldest of pending could have been delivered';
COMMENT ON COLUMN {s}.stats.lanes IS 'how many replicas can work at once';
COMMENT ON COLUMN {s}.stats.lanes_held IS 'how many lanes relays hold now; 0: nobody delivers';
COMMENT ON COLUMN {s}.stats.paused_by IS 'who paused it; NULL: it is not paused';
COMMENT ON COLUMN {s}.stats.paused_why IS 'why';
COMMENT ON COLUMN {s}.stats.paused_until IS 'until when; NULL: until somebody resumes';

COMMENT ON TABLE {s}.log IS 'the logs, and how far each was searched for events that no subscription wants';
COMMENT ON TABLE {s}.subscription IS 'named readers of logs, with their last configuration, and whether they are paused';
COMMENT ON TABLE {s}.lane IS 'cursors and leases';
COMMENT ON TABLE {s}.filter IS 'every filter that a subscription had';
COMMENT ON TABLE {s}.passage IS 'how far each lane read with a former filter';
COMMENT ON TABLE {s}.sent IS 'skipped events that were sent later';
COMMENT ON TABLE {s}.unrouted IS 'events that no subscription wants';
COMMENT ON TABLE {s}.replica IS 'relays that are alive';
COMMENT ON TABLE {s}.delivery IS 'events that left the stream: retrying, blocked, scheduled, dead, discarded. Read it as <log>_dead or <log>_state; change it with retry, discard and mark_dead';
COMMENT ON TABLE {s}.receipt IS 'ids of messages that were received';
COMMENT ON TABLE {s}.once IS 'ids of messages that were applied, by once';
COMMENT ON TABLE {s}.conflict IS 'messages that were rejected for a known id with another body';
COMMENT ON TABLE {s}.sleeper IS 'relays that wait to be woken';
COMMENT ON TABLE {s}.migration IS 'the migrations applied to this schema';

-- The logs that every store has.
SELECT {s}.create_log('outbox');
SELECT {s}.create_log('inbox');
