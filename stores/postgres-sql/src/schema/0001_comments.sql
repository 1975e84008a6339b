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
      ('_', 'attempts', 'counted attempts; a retry of a dead event and a replay begin anew'),
      ('_', 'replays', 'the number in its dedupe id (`-rN`) while it waits or is dead: a replay takes the next number of the subscription, a retry one more than the last of the event; 0 otherwise, also once it is delivered'),
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
  FOR c IN
    SELECT p.oid::regprocedure AS signature FROM unnest(ARRAY['window', 'append', 'append_many', 'has', 'receive', 'receive_many', 'depth']) AS made(suffix)
    JOIN pg_proc AS p ON p.pronamespace = {schema_literal}::regnamespace AND p.proname = log_name || '_' || made.suffix
  LOOP
    EXECUTE 'COMMENT ON FUNCTION ' || c.signature || ' IS ''internal''';
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
    UNION ALL
    SELECT p.oid::regprocedure, 'internal' FROM unnest(ARRAY['create_window', 'create_append', 'create_receive', 'create_depth', 'create_views',
      'comment_log', 'depths', 'lock_lanes', 'subscription_unknown', 'change', 'check_message', 'receive_body', 'settle_lane', 'recognise',
      'event_is_valid', 'headers_fault', 'check_json', 'uuid_v7', 'cluster_id', 'notify_sleepers']) AS ours(name)
    JOIN pg_proc AS p ON p.pronamespace = {schema_literal}::regnamespace AND p.proname = ours.name
      -- The schema may have functions of others under these names.
      AND pg_get_userbyid(p.proowner) = current_user AND obj_description(p.oid, 'pg_proc') IS NULL
  LOOP
    EXECUTE 'COMMENT ON FUNCTION ' || c.signature || ' IS ' || quote_literal(c.text);
  END LOOP;
END
${tag}$;

DO ${tag}$
DECLARE
  c record;
BEGIN
  FOR c IN
    SELECT {schema_literal} || '.' || quote_ident(said.of) || '.' || quote_ident(said.at) AS place, said.text FROM (VALUES
      ('log', 'name', 'its name'),
      ('log', 'created_at', 'when it was created'),
      ('log', 'routed_xid', 'up to which transaction its events were looked at, whether a subscription wants them'),
      ('log', 'routed_seq', 'up to which place within that transaction'),
      ('log', 'taken_snap', 'events that this snapshot sees had a reader that took everything'),
      ('log', 'epoch_next', 'the first epoch of new lanes'),
      ('log', 'kept_from', 'the place before which retention left no event; counts begin here'),
      ('subscription', 'id', 'its number, which other tables refer to'),
      ('subscription', 'name', 'its name'),
      ('subscription', 'log', 'the log that it reads'),
      ('subscription', 'topics', 'part of its filter: patterns, one of which has to match the topic'),
      ('subscription', 'kinds', 'part of its filter: the kinds it wants; empty: all'),
      ('subscription', 'aggregates', 'part of its filter: the aggregates it wants; empty: all'),
      ('subscription', 'headers', 'part of its filter: headers that an event must have; NULL: none'),
      ('subscription', 'tenant', 'the only tenant whose events it wants; NULL: all'),
      ('subscription', 'mixed', 'whether it once had another tenant, or none'),
      ('subscription', 'ordering', 'key: events of one key go out in order; none: in any order'),
      ('subscription', 'on_dead', 'what a dead event does to later ones of its key: continue, or halt'),
      ('subscription', 'lanes', 'how many replicas can work at once'),
      ('subscription', 'revision', 'the number of its filter, raised by every change'),
      ('subscription', 'rerouted', 'the revision of the filter that was compared with unrouted events'),
      ('subscription', 'rerouted_seq', 'and up to which place'),
      ('subscription', 'replays', 'the highest replay that any of its events had'),
      ('subscription', 'again_seq', 'since the last reset: up to which place events belong to again_replay'),
      ('subscription', 'again_replay', 'that replay'),
      ('subscription', 'generation', 'distinguishes it from earlier subscriptions of its name'),
      ('subscription', 'paused_by', 'who paused it; NULL: it is not paused'),
      ('subscription', 'paused_why', 'why'),
      ('subscription', 'paused_until', 'until when; NULL: until somebody resumes'),
      ('subscription', 'created_at', 'when it began'),
      ('lane', 'subscription', 'the number of its subscription'),
      ('lane', 'lane', 'its own number, from 0'),
      ('lane', 'from_snap', 'its cursor: the snapshot where its window begins'),
      ('lane', 'to_snap', 'its cursor: the snapshot where its window ends'),
      ('lane', 'low', 'the lowest place in its window'),
      ('lane', 'high', 'the highest place in its window'),
      ('lane', 'last_seq', 'its cursor: the last place within the window'),
      ('lane', 'revision', 'the number of the filter that it reads with'),
      ('lane', 'delivered', 'how many events were ever delivered'),
      ('lane', 'epoch', 'the number of its lease'),
      ('lane', 'owner', 'the relay that drives it'),
      ('lane', 'lease_until', 'when its lease ends'),
      ('lane', 'lease_ttl', 'the length of its lease in microseconds'),
      ('lane', 'granted_at', 'when its lease was granted'),
      ('lane', 'crashes', 'how many relays in a row crashed while they held it'),
      ('lane', 'cluster', 'the cluster that its snapshots belong to'),
      ('filter', 'subscription', 'the number of its subscription'),
      ('filter', 'revision', 'its own number'),
      ('filter', 'topics', 'patterns, one of which has to match the topic'),
      ('filter', 'kinds', 'the kinds it wants; empty: all'),
      ('filter', 'aggregates', 'the aggregates it wants; empty: all'),
      ('filter', 'headers', 'headers that an event must have; NULL: none'),
      ('filter', 'tenant', 'the only tenant whose events it wants; NULL: all'),
      ('passage', 'subscription', 'the number of its subscription'),
      ('passage', 'revision', 'the number of the former filter'),
      ('passage', 'lanes', 'how many lanes there were'),
      ('passage', 'lane', 'which of them this was'),
      ('passage', 'from_snap', 'the snapshot where its window began'),
      ('passage', 'to_snap', 'the snapshot where its window ended'),
      ('passage', 'last_seq', 'the last place it read'),
      ('passage', 'seq_max', 'events beyond this place count as not passed, because a reset took them back'),
      ('sent', 'subscription', 'the number of its subscription'),
      ('sent', 'seq', 'the place of the event in the log'),
      ('unrouted', 'log', 'the log'),
      ('unrouted', 'seq', 'the place of the event in the log'),
      ('replica', 'subscription', 'the number of its subscription'),
      ('replica', 'owner', 'the relay'),
      ('replica', 'alive_until', 'until when it counts as alive'),
      ('replica', 'alive_ttl', 'for how long it said so, in microseconds'),
      ('delivery', 'subscription', 'the number of its subscription'),
      ('delivery', 'seq', 'the place of the event in the log'),
      ('delivery', 'lane', 'the lane that the event belongs to'),
      ('delivery', 'key', 'the key of the event'),
      ('delivery', 'state', 'retrying, blocked, scheduled, dead or discarded'),
      ('delivery', 'ordered', 'whether the subscription was ordered by key when the row was added'),
      ('delivery', 'halt', 'whether the event, once dead, holds back later ones of its key'),
      ('delivery', 'holds', 'whether it holds back later events of its key now'),
      ('delivery', 'attempts', 'counted attempts; a retry of a dead event and a replay begin anew'),
      ('delivery', 'replays', 'the number in its dedupe id (`-rN`) while it waits or is dead: a replay takes the next number of the subscription, a retry one more than the last of the event; 0 otherwise, also once it is delivered'),
      ('delivery', 'crashes', 'how many relays crashed while they sent it alone'),
      ('delivery', 'due_at', 'the time of the next attempt'),
      ('delivery', 'code', 'the reason of the last failure'),
      ('delivery', 'error', 'the text of the last failure'),
      ('delivery', 'updated_at', 'when this last changed'),
      ('delivery', 'last_attempts', 'the last 8 failed calls: at, code, took_us, answer, next_at'),
      ('delivery', 'letters', 'the last death that was handed to a dead-letter sink, counted from 1'),
      ('delivery', 'letter_at', 'when the next dead letter is due'),
      ('receipt', 'source', 'where the message came from'),
      ('receipt', 'tenant', 'its tenant; empty: none'),
      ('receipt', 'message_id', 'its id'),
      ('receipt', 'digest', 'a digest of its body, to recognise another body under the same id'),
      ('receipt', 'received_at', 'when it was received'),
      ('once', 'source', 'the source that the caller of once named'),
      ('once', 'tenant', 'the tenant that the transaction named; empty: none'),
      ('once', 'message_id', 'the id of the message'),
      ('once', 'seen_at', 'when it was applied'),
      ('conflict', 'source', 'where the message came from'),
      ('conflict', 'tenant', 'its tenant; empty: none'),
      ('conflict', 'message_id', 'its id'),
      ('conflict', 'digest_stored', 'the digest of the body that is stored'),
      ('conflict', 'digest_refused', 'the digest of the body that was rejected'),
      ('conflict', 'times', 'how often it was rejected'),
      ('conflict', 'first_at', 'when it was first rejected'),
      ('conflict', 'last_at', 'when it was last rejected'),
      ('sleeper', 'log', 'the log that it waits for'),
      ('sleeper', 'owner', 'the relay'),
      ('sleeper', 'asleep_until', 'until when it sleeps unless it is woken'),
      ('sleeper', 'tenant', 'the tenant that it works for; empty: all'),
      ('migration', 'version', 'its number'),
      ('migration', 'name', 'its name'),
      ('migration', 'applied_at', 'when it was applied')) AS said(of, at, text)
  LOOP
    EXECUTE 'COMMENT ON COLUMN ' || c.place || ' IS ' || quote_literal(c.text);
  END LOOP;
  -- Only its owner may comment on the schema, and an application may have done so before.
  IF (SELECT pg_has_role(n.nspowner, 'USAGE') AND obj_description(n.oid, 'pg_namespace') IS NULL
    FROM pg_namespace AS n WHERE n.oid = {schema_literal}::regnamespace) THEN
    EXECUTE 'COMMENT ON SCHEMA ' || {schema_literal} || ' IS ''Postbox: events to be delivered (outbox), received messages (inbox), and the state of their delivery''';
  END IF;
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
