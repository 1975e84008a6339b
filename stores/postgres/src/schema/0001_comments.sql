-- What psql says of all this with `\d+` and `\df+`. The guide's tables are made of it.

-- Comments on a log and its views.
CREATE FUNCTION {s}.comment_log(log_name text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS ${tag}$
DECLARE
  c record;
BEGIN
  FOR c IN
    SELECT * FROM (VALUES
      ('', NULL, 'append-only: events in the order of their transactions. Append with enqueue or INSERT; never UPDATE'),
      ('', 'seq', 'the place in the log; the store''s own'),
      ('', 'xid', 'the writing transaction; the store''s own'),
      ('', 'id', 'the event''s id, the same at every attempt'),
      ('', 'topic', 'what happened, e.g. order.placed'),
      ('', 'key', 'events of one key arrive in the order of their commits'),
      ('', 'aggregate', 'the kind of thing that changed, e.g. order'),
      ('', 'version', 'the version of that thing'),
      ('', 'kind', 'a name for filters and handlers'),
      ('', 'source', 'the service that wrote it, or the source it was received from'),
      ('', 'tenant', 'subscriptions may be limited to one'),
      ('', 'payload', 'text, kept byte for byte; bytes that are no text go to payload_bytes'),
      ('', 'payload_bytes', 'the payload, where it is no text'),
      ('', 'content_type', 'NULL is application/json'),
      ('', 'headers', 'one JSON object of texts'),
      ('', 'occurred_at', 'when it happened'),
      ('', 'created_at', 'when it was appended; the store''s own'),
      ('', 'deliver_at', 'not before'),
      ('', 'expires_at', 'not any more'),
      ('', 'slot', 'decides the lane; the store''s own'),
      ('_state', NULL, 'where each event stands, a row for each subscription of the log; ask for one id, or it walks the log'),
      ('_dead', NULL, 'events that wait for a person: retry or discard them'),
      ('_', 'subscription', 'whose delivery this is'),
      ('_', 'id', 'the event; retry and discard take it'),
      ('_', 'topic', 'what happened'),
      ('_', 'key', 'its key'),
      ('_', 'state', 'pending, retrying, blocked, scheduled, dead, discarded, dispatched, skipped or unrouted'),
      ('_', 'attempts', 'counted attempts since it was last sent anew'),
      ('_', 'replays', 'how often it was sent anew'),
      ('_', 'due_at', 'the next attempt'),
      ('_', 'code', 'the reason of the last failure'),
      ('_', 'error', 'its text'),
      ('_', 'last_attempts', 'the last 8 failed calls: at, code, took_us, answer, next_at'),
      ('_', 'updated_at', 'when this last changed'),
      ('_', 'created_at', 'when the event was appended'),
      ('_', 'tenant', 'its tenant'),
      ('_', 'headers', 'its headers'),
      ('_', 'content_type', 'NULL is application/json'),
      ('_', 'payload', 'its payload, where that is text'),
      ('_', 'payload_bytes', 'its payload, where that is no text')) AS said(of, at, text)
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
      ('enqueue', 'appends an event in your transaction and gives its id: topic, payload (text, jsonb or bytea), and by name what else it has. With an id that is there already, a notice says so and nothing is appended'),
      ('event_id', 'the id of an idempotency key, always the same: an event under it is appended once. Name the event: order-42-paid'),
      ('retry', 'sends dead and retrying events of a subscription again now; how many. At most 1000 ids in a call'),
      ('discard', 'takes events out that are not delivered yet, for good, and lets the next of their keys go; how many. At most 1000 ids in a call'),
      ('mark_dead', 'makes events dead that are not delivered yet, with a reason for whoever reads it later: no attempt more, until a retry; how many. At most 1000 ids in a call'),
      ('pause', 'stops a subscription, until a time or until somebody resumes: why, until when, by whom (you)'),
      ('resume', 'lets a paused subscription go on'),
      ('once', 'whether this message is seen for the first time, decided in your transaction: do its work only where true'),
      ('receive', 'stores a verified message from outside once: accepted, duplicate (known with this payload) or conflict (known with another)'),
      ('depth', 'counts of a subscription by state and topic, age in microseconds; the view stats adds them up'),
      ('create_log', 'makes a log, if it is not there; for the owner'),
      ('notify_enable', 'lets the writers of a log wake relays; for the owner'),
      ('notify_disable', 'the contrary'),
      ('guard_log', 'puts the rules on a log''s rows; for the owner, after he took them away')) AS said(name, text)
    JOIN pg_proc AS p ON p.pronamespace = {schema_literal}::regnamespace AND p.proname = said.name
  LOOP
    EXECUTE 'COMMENT ON FUNCTION ' || c.signature || ' IS ' || quote_literal(c.text);
  END LOOP;
END
${tag}$;

COMMENT ON VIEW {s}.stats IS 'a row for each subscription; counts cost the same at any size';
COMMENT ON COLUMN {s}.stats.subscription IS 'its name';
COMMENT ON COLUMN {s}.stats.log IS 'the log that it reads';
COMMENT ON COLUMN {s}.stats.pending IS 'everything still to be delivered: unread, retrying, blocked and scheduled';
COMMENT ON COLUMN {s}.stats.retrying IS 'part of pending: failed, will be tried again';
COMMENT ON COLUMN {s}.stats.blocked IS 'part of pending: behind their key';
COMMENT ON COLUMN {s}.stats.scheduled IS 'part of pending: wait for their time';
COMMENT ON COLUMN {s}.stats.dead IS 'wait for a person';
COMMENT ON COLUMN {s}.stats.discarded IS 'a person took them out';
COMMENT ON COLUMN {s}.stats.dispatched IS 'delivered since the subscription began';
COMMENT ON COLUMN {s}.stats.skipped IS 'passed and never sent, because it was not wanted; of what the log still has';
COMMENT ON COLUMN {s}.stats.estimated IS 'whether there was too much to count: of what is unread an estimate, of another state that many or more. All subscriptions share 10000 events of each state, 500 at least for each';
COMMENT ON COLUMN {s}.stats.skipped_estimated IS 'whether skipped is an estimate: more was passed than is counted';
COMMENT ON COLUMN {s}.stats.oldest_pending_seconds IS 'the lag: for how long the oldest of pending could have been delivered';
COMMENT ON COLUMN {s}.stats.lanes IS 'how many replicas can work at once';
COMMENT ON COLUMN {s}.stats.lanes_held IS 'how many a relay holds now; 0: nobody delivers';
COMMENT ON COLUMN {s}.stats.paused_by IS 'who paused it; NULL: it is not paused';
COMMENT ON COLUMN {s}.stats.paused_why IS 'why';
COMMENT ON COLUMN {s}.stats.paused_until IS 'until when; NULL: until somebody resumes';

COMMENT ON TABLE {s}.log IS 'the logs there are, and how far each was looked through for events that nobody wants';
COMMENT ON TABLE {s}.subscription IS 'named readers of logs, as their configuration was last said, and whether they are paused';
COMMENT ON TABLE {s}.lane IS 'cursors and leases';
COMMENT ON TABLE {s}.filter IS 'every filter that a subscription had';
COMMENT ON TABLE {s}.passage IS 'how far each lane came by a former filter';
COMMENT ON TABLE {s}.sent IS 'skipped events that were sent all the same';
COMMENT ON TABLE {s}.unrouted IS 'events that no subscription wants';
COMMENT ON TABLE {s}.replica IS 'relays that are alive';
COMMENT ON TABLE {s}.delivery IS 'events that left the stream: retrying, blocked, scheduled, dead, discarded. Read it as <log>_dead or <log>_state; change it with retry, discard and mark_dead';
COMMENT ON TABLE {s}.receipt IS 'ids of messages that were received';
COMMENT ON TABLE {s}.once IS 'ids of messages that were applied, by once';
COMMENT ON TABLE {s}.conflict IS 'messages that came with a known id and another body';
COMMENT ON TABLE {s}.sleeper IS 'relays that wait to be woken';
COMMENT ON TABLE {s}.migration IS 'what was applied to this schema';

-- The logs that every store has.
SELECT {s}.create_log('outbox');
SELECT {s}.create_log('inbox');
