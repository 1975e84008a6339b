-- How deep a subscription is: what it has still to deliver, by topic, and what left the stream.

-- The depth of a subscription: see `create_depth`. One call, because a scrape asks for each. Where
-- there is no such subscription it gives no row.
CREATE FUNCTION {s}.depth(subscription_name text, look_max bigint DEFAULT 10001)
RETURNS TABLE (state text, topic text, events bigint, age bigint, is_estimate boolean)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog AS ${tag}$
#variable_conflict use_column
DECLARE
  s record;
BEGIN
  SELECT known.id, known.log, known.lanes::int AS lanes, known.tenant,
      CASE WHEN known.topics <> '{}' THEN ARRAY(SELECT {like_of_topic} FROM unnest(known.topics) AS wanted(topic)) END AS likes,
      nullif(known.kinds, '{}') AS kinds, nullif(known.aggregates, '{}') AS aggregates, known.headers
    INTO s FROM {s}.subscription AS known WHERE known.name = subscription_name;
  IF FOUND THEN
    RETURN QUERY EXECUTE 'SELECT * FROM ' || {schema_literal} || '.' || quote_ident(s.log || '_depth') || '($1, $2, $3, $4, $5, $6, $7, $8)'
      USING s.id, s.lanes, s.likes, s.tenant, s.kinds, s.aggregates, s.headers, look_max;
  END IF;
END
${tag}$;

-- Makes the function `<log>_depth` of a log. Idempotent.
--
-- A look costs the same however many events the log keeps: it looks at no more than `look_max`
-- rows of each kind, and at 2,048 more where that was not enough to see all that is unread. In the
-- database because a statement like this costs more to plan than to run, and is asked for each
-- subscription at each scrape.
--
-- The parameters: the subscription with its number of lanes and its filter, and `look_max`.
--
-- The answer, by `state`:
--   dispatched  what was delivered since the subscription began, counted where it was settled
--   pending     unread events of a topic; `is_estimate`: there are too many to count, `events` is
--               drawn from samples, and `age` is that of the first ones, or NULL where none of them
--               is of the topic. A row without a topic says that samples were needed
--   retrying, blocked, scheduled  waiting events of a topic, the first `look_max` of the state
--   dead, discarded  how many, `look_max` at most
-- `age` is that of the oldest in microseconds, from when it may be delivered.
CREATE FUNCTION {s}.create_depth(log_name text) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog AS ${tag}$
BEGIN
  EXECUTE replace(${tag}_ddl$
    CREATE OR REPLACE FUNCTION {s}.{tag}_log_depth(
      of_subscription int, lane_count int, topic_likes text[], of_tenant text,
      of_kinds text[], of_aggregates text[], of_headers jsonb, look_max bigint)
    RETURNS TABLE (state text, topic text, events bigint, age bigint, is_estimate boolean)
    LANGUAGE plpgsql STABLE {pinned}
    AS ${tag}_body$
    #variable_conflict use_column
    DECLARE
      froms pg_snapshot[];
      tos pg_snapshot[];
      settled bigint[];
      window_low bigint;
      window_high bigint;
      ahead xid8;
      late xid8[];
      has_marks boolean;
      topics text[];
      counts bigint[];
      sinces timestamptz[];
      looked bigint;
      first_seq bigint;
      last_seq bigint;
    BEGIN
      RETURN QUERY SELECT 'dispatched', NULL::text, coalesce(sum(n.delivered), 0)::bigint, NULL::bigint, false
        FROM {s}.lane AS n WHERE n.subscription = of_subscription;
      RETURN QUERY SELECT closed.state, NULL::text, count(*), NULL::bigint, false
        FROM (VALUES ('dead'), ('discarded')) AS closed(state)
        CROSS JOIN LATERAL (
          SELECT FROM {s}.delivery AS d WHERE d.subscription = of_subscription AND d.state = closed.state LIMIT look_max OFFSET 0) AS d
        GROUP BY closed.state;
      -- An event that somebody deleted from the log has no topic, and waits since its row changed.
      RETURN QUERY SELECT r.state, r.topic, count(*), {age_of_oldest}, false
        FROM (
          SELECT waiting.state, coalesce(l.topic, '') AS topic,
            greatest(coalesce(l.created_at, d.updated_at), l.deliver_at, CASE waiting.state WHEN 'scheduled' THEN d.due_at END) AS since
          FROM (VALUES ('retrying'), ('blocked'), ('scheduled')) AS waiting(state)
          CROSS JOIN LATERAL (
            SELECT d.seq, d.updated_at, d.due_at FROM {s}.delivery AS d
            WHERE d.subscription = of_subscription AND d.state = waiting.state ORDER BY d.seq LIMIT look_max OFFSET 0) AS d
          LEFT JOIN {s}."{tag}_log" AS l ON l.seq = d.seq) AS r
        GROUP BY r.state, r.topic;

      SELECT array_agg(n.from_snap ORDER BY of_lane), array_agg(n.to_snap ORDER BY of_lane), array_agg(n.last_seq ORDER BY of_lane),
          min(greatest(n.low, n.last_seq)) FILTER (WHERE n.last_seq < n.high), max(n.high) FILTER (WHERE n.last_seq < n.high),
          min(pg_snapshot_xmax(n.to_snap))
        INTO froms, tos, settled, window_low, window_high, ahead
        FROM generate_series(0, lane_count - 1) AS of_lane
        LEFT JOIN {s}.lane AS n ON n.subscription = of_subscription AND n.lane = of_lane;
      late := ARRAY(
        SELECT DISTINCT running.xid FROM {s}.lane AS n
        CROSS JOIN LATERAL (SELECT pg_snapshot_xip(n.from_snap) UNION ALL SELECT pg_snapshot_xip(n.to_snap)) AS running(xid)
        WHERE n.subscription = of_subscription AND pg_visible_in_snapshot(running.xid, pg_current_snapshot()));
      -- Only a person's word can be on an event that is not read yet.
      has_marks := EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = of_subscription AND d.state = 'discarded');

      -- What is unread is in one of three places: in an open window, after all windows, or of a
      -- transaction that was running at an edge of one. Each is a walk of an index; a limit on what
      -- is looked at and not on what is found, or a rare topic would walk the whole log.
      SELECT sum(t.looked), min(t.first_seq), array_agg(t.topic), array_agg(t.events), array_agg(t.since)
        INTO looked, first_seq, topics, counts, sinces
        FROM (
          SELECT e.topic, count(*) AS looked, min(e.seq) AS first_seq,
            count(*) FILTER (WHERE e.is_unread) AS events, min(e.since) FILTER (WHERE e.is_unread AND isfinite(e.since)) AS since
          FROM (
            SELECT l.seq, l.topic, greatest(l.created_at, l.deliver_at) AS since,
              CASE l.place
                WHEN 'window' THEN l.xid <> ALL (late) AND pg_visible_in_snapshot(l.xid, tos[1 + l.slot % lane_count])
                WHEN 'ahead' THEN l.xid <> ALL (late) AND NOT pg_visible_in_snapshot(l.xid, tos[1 + l.slot % lane_count])
                ELSE true
              END AND {is_pending} AS is_unread
            FROM (
              (SELECT {looked_at}, 'window' AS place FROM {s}."{tag}_log" AS l
                WHERE l.seq > window_low AND l.seq <= window_high ORDER BY l.seq LIMIT look_max)
              UNION ALL
              (SELECT {looked_at}, 'ahead' FROM {s}."{tag}_log" AS l
                WHERE l.xid >= ahead ORDER BY l.xid, l.seq LIMIT look_max)
              UNION ALL
              (SELECT l.*, 'late' FROM unnest(late) AS ended(xid)
                CROSS JOIN LATERAL (
                  SELECT {looked_at} FROM {s}."{tag}_log" AS l
                  WHERE l.xid >= ended.xid AND l.xid <= ended.xid ORDER BY l.xid, l.seq LIMIT look_max OFFSET 0) AS l)
              LIMIT look_max) AS l) AS e
          GROUP BY e.topic) AS t;
      IF looked IS NULL OR looked < look_max THEN
        RETURN QUERY SELECT 'pending', r.topic, r.events, {age_of_oldest}, false
          FROM unnest(topics, counts, sinces) AS r(topic, events, since) WHERE r.events > 0
          GROUP BY r.topic, r.events;
        RETURN;
      END IF;

      -- Too many: 64 blocks of 32 places, drawn from equal parts of what lies between the first
      -- that was looked at and the end. It divides by places and not by rows, so that gaps count.
      SELECT l.seq INTO last_seq FROM {s}."{tag}_log" AS l ORDER BY l.seq DESC LIMIT 1;
      RETURN QUERY SELECT 'pending', NULL::text, 0::bigint, NULL::bigint, true;
      RETURN QUERY SELECT 'pending', coalesce(r.topic, sampled.topic), greatest(r.events, sampled.events), {age_of_oldest}, true
        FROM unnest(topics, counts, sinces) AS r(topic, events, since)
        FULL JOIN (
          SELECT l.topic, round(count(*) * ((last_seq - first_seq + 1)::float8 / (64 * 32)))::bigint AS events
          FROM generate_series(0, 63) AS block
          CROSS JOIN LATERAL (
            SELECT first_seq + ((block + random()) * ((last_seq - first_seq + 1)::float8 / 64))::bigint AS seq OFFSET 0) AS place
          CROSS JOIN LATERAL (
            SELECT {looked_at} FROM {s}."{tag}_log" AS l
            WHERE l.seq >= place.seq AND l.seq < place.seq + 32 AND l.seq <= last_seq OFFSET 0) AS l
          WHERE {is_pending} GROUP BY l.topic) AS sampled ON sampled.topic = r.topic
        WHERE greatest(r.events, sampled.events) > 0
        GROUP BY coalesce(r.topic, sampled.topic), greatest(r.events, sampled.events);
    END
    ${tag}_body$
  ${tag}_ddl$, '{tag}_log', log_name);
END
${tag}$;
