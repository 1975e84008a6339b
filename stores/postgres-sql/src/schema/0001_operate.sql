-- What an operator changes of a subscription and its events, and what a consumer with its own
-- receive loop asks of the inbox. Callable from any language, with the rules of the commands of the
-- same names.
--
-- The store calls these same functions, so there is one set of rules. They run with the caller's
-- rights, in the caller's transaction.

-- Locks the cursor of every lane, in order, even if lanes are replaced by others meanwhile. Every
-- change of delivery rows does this first, as settling does, so that two transactions never decide
-- at once which row of a key is next. Index: primary key of `lane`. Waits for a settlement in
-- progress, never for a relay's deliveries.
CREATE FUNCTION {s}.lock_lanes(of_subscription int) RETURNS void LANGUAGE plpgsql VOLATILE {pinned} AS ${tag}$
DECLARE
  locked bigint;
BEGIN
  FOR try IN 1..3 LOOP
    PERFORM FROM {s}.lane AS n WHERE n.subscription = of_subscription ORDER BY n.lane FOR NO KEY UPDATE OF n;
    GET DIAGNOSTICS locked = ROW_COUNT;
    EXIT WHEN locked = (SELECT s.lanes FROM {s}.subscription AS s WHERE s.id = of_subscription);
  END LOOP;
END
${tag}$;

CREATE FUNCTION {s}.subscription_unknown(name text) RETURNS void LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  RAISE EXCEPTION 'there is no subscription %', name USING ERRCODE = 'PB002', HINT = 'known: ' || coalesce(
    (SELECT string_agg(known.name, ', ' ORDER BY known.name) FROM (SELECT s.name FROM {s}.subscription AS s ORDER BY s.name LIMIT 50) AS known),
    'none yet');
END
${tag}$;

-- One step of `retry`, `discard` or `mark_dead` (`action`) over the selected events: see `Admin` in
-- postbox_core. A criterion that is NULL selects everything. `dead_micros` selects events that have
-- been dead for this long and whose key does not wait for an operator. The error of an event that
-- is ended begins with `note`.
--
-- Events are selected before the lanes are locked, however many rows have to be read for it. Under
-- the lock only the rows of this step are written, each if it still matches. Ids are the exception:
-- they are selected under the lock. They are few, and an event that a relay settles between
-- selection and lock would be found neither as a row nor as unread.
CREATE FUNCTION {s}.change(
  action text, of_name text, of_ids uuid[], topic_like text DEFAULT NULL, of_key text DEFAULT NULL, since timestamptz DEFAULT NULL,
  until timestamptz DEFAULT NULL, of_code text DEFAULT NULL, after_seq bigint DEFAULT 0, most bigint DEFAULT 1000, is_dry boolean DEFAULT false,
  of_tenant text DEFAULT NULL, dead_micros bigint DEFAULT NULL, note text DEFAULT NULL, OUT changed bigint, OUT next_seq bigint)
LANGUAGE plpgsql VOLATILE {pinned} AS ${tag}$
DECLARE
  s record;
  -- Which rows may be changed, and how; `$3` is now.
  may text := CASE action WHEN 'retry' THEN '(d.state = ''dead'' OR (d.state = ''retrying'' AND d.due_at > $3))'
    WHEN 'mark_dead' THEN '(d.state IN (''retrying'', ''blocked''))' ELSE '(d.state <> ''discarded'')' END;
  is_mark boolean := action = 'mark_dead';
  at timestamptz := clock_timestamp();
  seqs bigint[];
  keys text[];
  unread bigint;
BEGIN
  SELECT known.id, known.log, known.on_dead = 'halt' AS halts INTO s FROM {s}.subscription AS known WHERE known.name = of_name;
  IF NOT FOUND THEN
    PERFORM {s}.subscription_unknown(of_name);
  END IF;
  IF cardinality(of_ids) > 1000 THEN
    RAISE EXCEPTION '% ids are too many for one call', cardinality(of_ids) USING ERRCODE = 'check_violation', CONSTRAINT = 'too_many_ids',
      HINT = 'give at most 1000 at a time, and commit after each: relays wait until then';
  END IF;
  IF dead_micros IS NOT NULL THEN
    may := may || format(' AND d.state = ''dead'' AND NOT d.holds AND d.updated_at <= $3 - %s * interval ''1 microsecond''', dead_micros);
  END IF;
  -- An event that was marked dead before it was read is still in the stream. If it were retried
  -- before its lane has passed it, it would be sent twice.
  IF action = 'retry' THEN
    may := may || replace(${tag}_sql$ AND (d.code IS DISTINCT FROM 'marked_dead' OR NOT EXISTS (
      SELECT FROM {log} AS l JOIN {s}.lane AS n ON n.subscription = d.subscription AND n.lane = d.lane
      WHERE l.seq = d.seq AND {is_unread} OFFSET 0))${tag}_sql$, '{tag}_log', s.log);
  END IF;
  IF of_ids IS NOT NULL AND NOT is_dry THEN
    PERFORM {s}.lock_lanes(s.id);
    at := clock_timestamp();
  END IF;
  -- Oldest first. By criteria: a walk of the primary key, which includes rows whose event was
  -- deleted from the log, unless a criterion concerns the event. By ids: through the unique index
  -- of the log, with `OFFSET 0`, because without statistics the planner would read all rows for a
  -- few.
  EXECUTE replace(replace(CASE WHEN of_ids IS NULL THEN ${tag}_sql$
      SELECT ARRAY(SELECT d.seq FROM {s}.delivery AS d LEFT JOIN {log} AS l ON l.seq = d.seq
        WHERE d.subscription = $1 AND d.seq > $8 AND {tag}_may AND ($9::text IS NULL OR d.code = $9) AND {is_meant}
        ORDER BY d.seq LIMIT $10)
    ${tag}_sql$ ELSE ${tag}_sql$
      SELECT ARRAY(SELECT l.seq FROM (SELECT * FROM {log} WHERE id = ANY ($2) OFFSET 0) AS l
        CROSS JOIN LATERAL (SELECT * FROM {s}.delivery AS r WHERE r.subscription = $1 AND r.seq = l.seq OFFSET 0) AS d
        WHERE l.seq > $8 AND {tag}_may AND ($9::text IS NULL OR d.code = $9) AND {is_meant}
        ORDER BY l.seq LIMIT $10)
    ${tag}_sql$ END, '{tag}_may', may), '{tag}_log', s.log)
    INTO seqs USING s.id, of_ids, at, topic_like, of_key, since, until, after_seq, of_code, most, of_tenant;
  changed := cardinality(seqs);
  next_seq := CASE WHEN changed = most THEN seqs[changed] END;
  IF changed > 0 AND NOT is_dry THEN
    IF of_ids IS NULL THEN
      PERFORM {s}.lock_lanes(s.id);
      at := clock_timestamp();
    END IF;
    -- Dead and waiting rows become due now. An event that crashed relays is sent alone. Index:
    -- primary key. Locks the rows.
    EXECUTE replace(CASE action WHEN 'retry' THEN ${tag}_sql$
        WITH raised AS (UPDATE {s}.subscription AS s SET replays = greatest(s.replays, r.replays)
          FROM (SELECT least(max(d.replays) + 1, 2000000000) AS replays FROM {s}.delivery AS d WHERE d.ctid = ANY ({places})) AS r WHERE s.id = $1),
        changed AS (UPDATE {s}.delivery AS d SET
            replays = least(d.replays + (d.state = 'dead')::int, 2000000000), attempts = CASE d.state WHEN 'dead' THEN 0 ELSE d.attempts END,
            crashes = CASE d.state WHEN 'dead' THEN least(d.crashes, 1) ELSE d.crashes END,
            state = 'retrying', halt = false, letter_at = '-infinity', due_at = $3, updated_at = clock_timestamp()
          WHERE d.ctid = ANY ({places}) AND {tag}_may AND ($7::text IS NULL OR d.code = $7) RETURNING d.key)
        SELECT count(*), array_agg(DISTINCT c.key) FILTER (WHERE c.key IS NOT NULL) FROM changed AS c
      ${tag}_sql$ ELSE ${tag}_sql$
        WITH changed AS (UPDATE {s}.delivery AS d SET
            state = CASE WHEN $5 THEN 'dead' ELSE 'discarded' END, halt = $5 AND $6, code = CASE WHEN $5 THEN 'marked_dead' ELSE d.code END,
            due_at = NULL, updated_at = clock_timestamp(), error = coalesce(left($4 || coalesce('; before: ' || d.error, ''), 2048), d.error)
          WHERE d.ctid = ANY ({places}) AND {tag}_may AND ($7::text IS NULL OR d.code = $7) RETURNING d.key)
        SELECT count(*), array_agg(DISTINCT c.key) FILTER (WHERE c.key IS NOT NULL) FROM changed AS c
      ${tag}_sql$ END, '{tag}_may', may)
      INTO changed, keys USING s.id, seqs, at, note, is_mark, s.halts, of_code;
    EXECUTE CASE action WHEN 'retry' THEN ${tag}_sql${clear_follower_due}${tag}_sql$ ELSE ${tag}_sql${delivery_release}${tag}_sql$ END
      USING s.id, keys;
  END IF;
  -- Unread events have no row and no code; only ids select them. Marking them keeps them from being
  -- sent when they are read.
  IF action <> 'retry' AND of_ids IS NOT NULL AND of_code IS NULL AND dead_micros IS NULL AND next_seq IS NULL THEN
    EXECUTE replace(replace(CASE WHEN is_dry THEN 'SELECT count(*) FROM ({tag}_unread) AS u' ELSE ${tag}_sql$
        WITH made AS (INSERT INTO {s}.delivery (subscription, lane, seq, key, state, ordered, halt, replays, code, error) {tag}_unread ON CONFLICT DO NOTHING RETURNING 1)
        SELECT count(*) FROM made
      ${tag}_sql$ END, '{tag}_unread', ${tag}_sql$
        SELECT $1, n.lane, l.seq, l.key, CASE WHEN $12 THEN 'dead' ELSE 'discarded' END, s.ordering = 'key', $12 AND s.on_dead = 'halt',
          CASE WHEN l.seq <= s.again_seq THEN s.again_replay ELSE 0 END, CASE WHEN $12 THEN 'marked_dead' END, $13
        FROM (SELECT * FROM {log} WHERE id = ANY ($2) OFFSET 0) AS l
        JOIN {s}.subscription AS s ON s.id = $1
        JOIN {s}.lane AS n ON n.subscription = $1 AND n.lane = l.slot % s.lanes
        WHERE {is_meant} AND {is_unread} AND {is_wanted} AND (l.deliver_at IS NULL OR NOT $12)
          AND NOT EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = $1 AND d.seq = l.seq)
        ORDER BY l.seq LIMIT $9
      ${tag}_sql$), '{tag}_log', s.log)
      INTO unread USING s.id, of_ids, at, topic_like, of_key, since, until, after_seq, most - changed, of_code, of_tenant, is_mark, note;
    -- Marked events are not found again, so the next step may start from the same place. A dry run
    -- would find them again, and has seen all that are named.
    IF unread > 0 AND unread = most - changed AND NOT is_dry THEN
      next_seq := after_seq;
    END IF;
    changed := changed + unread;
  END IF;
END
${tag}$;

-- An empty list of ids means none, never all: it may come from a query that finds nothing.
CREATE FUNCTION {s}.retry(subscription text, VARIADIC ids uuid[]) RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  RETURN (SELECT c.changed FROM {s}.change('retry', retry.subscription, coalesce(ids, '{}')) AS c);
END
${tag}$;

CREATE FUNCTION {s}.discard(subscription text, VARIADIC ids uuid[]) RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  RETURN (SELECT c.changed FROM {s}.change('discard', discard.subscription, coalesce(ids, '{}')) AS c);
END
${tag}$;

CREATE FUNCTION {s}.mark_dead(subscription text, why text, VARIADIC ids uuid[]) RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  RETURN (SELECT c.changed FROM {s}.change('mark_dead', mark_dead.subscription, coalesce(ids, '{}'),
    note => 'marked dead by a person' || coalesce(': ' || nullif(left(why, 512), ''), '')) AS c);
END
${tag}$;

-- Index: the unique name. Locks the row.
CREATE FUNCTION {s}.pause(subscription text, why text, until timestamptz DEFAULT NULL, by text DEFAULT session_user) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  IF until >= '9999-12-30 22:00:01+00' THEN
    RAISE EXCEPTION 'nobody can wait until %', until USING ERRCODE = 'check_violation', CONSTRAINT = 'until_invalid',
      HINT = 'leave it out to pause until somebody resumes';
  END IF;
  -- Otherwise a wrong time would end a former pause without a word.
  IF until <= clock_timestamp() THEN
    RAISE EXCEPTION 'the pause would end at %, which has passed', until USING ERRCODE = 'check_violation', CONSTRAINT = 'until_past',
      HINT = 'give a later time, or leave it out to pause until somebody resumes; to end a pause, use resume';
  END IF;
  UPDATE {s}.subscription AS s SET paused_by = left(coalesce(pause.by, session_user), 255), paused_why = left(coalesce(pause.why, ''), 2048),
      paused_until = pause.until
    WHERE s.name = pause.subscription;
  IF NOT FOUND THEN
    PERFORM {s}.subscription_unknown(subscription);
  END IF;
END
${tag}$;

CREATE FUNCTION {s}.resume(subscription text) RETURNS void LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  UPDATE {s}.subscription AS s SET paused_by = NULL, paused_why = NULL, paused_until = NULL WHERE s.name = resume.subscription;
  IF NOT FOUND THEN
    PERFORM {s}.subscription_unknown(subscription);
  END IF;
END
${tag}$;

-- Refuses a message without a valid source and id.
CREATE FUNCTION {s}.check_message(source text, message_id text) RETURNS void LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  IF source IS NULL OR source COLLATE "C" !~ '^[A-Za-z0-9._-]{1,128}$' THEN
    RAISE EXCEPTION '% is not a valid source name', coalesce(quote_literal(source), 'NULL') USING ERRCODE = 'check_violation', CONSTRAINT = 'name_invalid',
      HINT = 'letters, digits, dot, underscore and hyphen, 1 to 128 of them';
  END IF;
  IF message_id IS NULL OR octet_length(message_id) NOT BETWEEN 1 AND 255 THEN
    RAISE EXCEPTION 'the message id has % bytes', coalesce(octet_length(message_id), 0) USING ERRCODE = 'check_violation', CONSTRAINT = 'message_id_invalid',
      HINT = 'an id has 1 to 255 bytes; use a digest of a longer one';
  END IF;
  IF message_id COLLATE "C" ~ E'[\\u0001-\\u001f\\u007f-\\u009f]' THEN
    RAISE EXCEPTION 'the message id has control characters' USING ERRCODE = 'check_violation', CONSTRAINT = 'message_id_invalid',
      HINT = 'give the id as the sender wrote it, or a digest of it';
  END IF;
END
${tag}$;

-- Index: primary key of `once`, on which a second call waits for the first one's transaction.
CREATE FUNCTION {s}.once(source text, message_id text) RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  PERFORM {s}.check_message($1, $2);
  INSERT INTO {s}.once (source, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING;
  RETURN FOUND;
END
${tag}$;

-- Receives one message: see `create_receive`. Its body is given as bytes, and also as text if the
-- text column can hold it. The caller's transaction keeps its own lock_timeout.
CREATE FUNCTION {s}.receive_body(
  source text, message_id text, topic text, body bytea, as_text text, key text, tenant text, content_type text, headers jsonb, log text
) RETURNS text LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS ${tag}$
DECLARE
  verdict text;
BEGIN
  PERFORM {s}.check_message(source, message_id);
  IF NOT EXISTS (SELECT FROM {s}.log AS l WHERE l.name = receive_body.log) THEN
    RAISE EXCEPTION 'there is no log %', quote_literal(log) USING ERRCODE = 'undefined_table', HINT = 'create it with create_log(name)';
  END IF;
  IF topic IS NULL THEN
    RAISE EXCEPTION 'the message has no topic' USING ERRCODE = 'not_null_violation', COLUMN = 'topic', HINT = 'name what happened, e.g. invoice.paid';
  END IF;
  IF body IS NULL THEN
    RAISE EXCEPTION 'the message has no payload' USING ERRCODE = 'check_violation', CONSTRAINT = 'payload_missing', HINT = 'it may be empty, but not NULL';
  END IF;
  EXECUTE 'SELECT ' || {schema_literal} || '.' || quote_ident(log || '_receive')
    || '($1, $2, $3, $4, $5, $6, NULL, NULL, NULL, $1, $7, $8, $9, $10, $11, NULL, NULL, NULL)'
    INTO verdict USING source, message_id, sha256(body), {s}.uuid_v7(), topic, key, tenant, as_text, CASE WHEN as_text IS NULL THEN body END,
      content_type, (coalesce(headers, '{}') || jsonb_build_object('postbox-message-id', message_id))::text;
  RETURN verdict;
END
${tag}$;

CREATE FUNCTION {s}.receive(
  source text, message_id text, topic text, payload text, key text DEFAULT NULL, tenant text DEFAULT NULL, content_type text DEFAULT NULL,
  headers jsonb DEFAULT NULL, log text DEFAULT 'inbox'
) RETURNS text LANGUAGE sql VOLATILE
RETURN {s}.receive_body(source, message_id, topic, convert_to(payload, 'UTF8'), CASE WHEN left(payload, 2) <> E'\\x' THEN payload END, key, tenant,
  content_type, headers, log);

CREATE FUNCTION {s}.receive(
  source text, message_id text, topic text, payload bytea, key text DEFAULT NULL, tenant text DEFAULT NULL,
  content_type text DEFAULT 'application/octet-stream', headers jsonb DEFAULT NULL, log text DEFAULT 'inbox'
) RETURNS text LANGUAGE sql VOLATILE
RETURN {s}.receive_body(source, message_id, topic, payload, NULL, key, tenant, content_type, headers, log);
