-- The depth of subscriptions: what they have still to deliver, by topic, their delivery rows, and
-- what they skipped.

-- The depth of several subscriptions: see `create_depth`. One call, because a metrics scrape asks
-- for all. An unknown name gives no row.
CREATE FUNCTION {s}.depths(subscription_names text[], look_max bigint)
RETURNS TABLE (subscription text, state text, topic text, events bigint, age bigint, is_estimate boolean)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS ${tag}$
#variable_conflict use_column
DECLARE
  of_log record;
BEGIN
  FOR of_log IN SELECT s.log, array_agg(s.name) AS names FROM {s}.subscription AS s WHERE s.name = ANY (subscription_names) GROUP BY s.log LOOP
    RETURN QUERY EXECUTE 'SELECT * FROM ' || {schema_literal} || '.' || quote_ident(of_log.log || '_depth') || '($1, $2)' USING of_log.names, look_max;
  END LOOP;
END
${tag}$;

-- The depth of one subscription.
CREATE FUNCTION {s}.depth(subscription_name text, look_max bigint DEFAULT 10001)
RETURNS TABLE (state text, topic text, events bigint, age bigint, is_estimate boolean)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS ${tag}$
#variable_conflict use_column
BEGIN
  RETURN QUERY SELECT d.state, d.topic, d.events, d.age, d.is_estimate FROM {s}.depths(ARRAY[subscription_name], look_max) AS d;
END
${tag}$;

-- Creates the function `<log>_depth` of a log. Idempotent.
--
-- A call reads a bounded number of rows, however many events the log holds, were deleted from it,
-- or are being appended. For each subscription it reads at most `look_max` rows of each kind. If
-- there are more, it reads blocks of 32 places sampled from the log: 64 blocks for 10,000 rows,
-- fewer for fewer, at least 16. It runs in the database because statements like these cost more to
-- plan than to run, and each scrape runs them for each subscription.
--
-- The result, by `state`:
--   dispatched  delivered since the subscription began, counted when settled
--   pending     unread events of a topic; `is_estimate`: there are too many to count, `events` is
--               computed from samples, and `age` is that of the first ones, or NULL if none of them
--               is of the topic. A row without a topic says that samples were needed
--   retrying, blocked, scheduled  waiting events of a topic, the first `look_max` of the state
--   dead, discarded  how many, at most `look_max`
--   skipped     events that were passed and not wanted; `is_estimate`: computed from samples.
--               Missing if everything was always wanted
-- `age` is that of the oldest event in microseconds, from the time when it may be delivered.
CREATE FUNCTION {s}.create_depth(log_name text) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  EXECUTE replace(${tag}_ddl$
    CREATE OR REPLACE FUNCTION {s}.{tag}_log_depth(subscription_names text[], look_max bigint)
    RETURNS TABLE (subscription text, state text, topic text, events bigint, age bigint, is_estimate boolean)
    LANGUAGE plpgsql STABLE {pinned}
    AS ${tag}_body$
    #variable_conflict use_column
    DECLARE
      blocks int := greatest(16, least(64, look_max * 64 / 10000));
      of_name text;
      of_subscription int;
      lane_count int;
      topic_likes text[];
      of_tenant text;
      of_kinds text[];
      of_aggregates text[];
      of_headers jsonb;
      of_revision int;
      takes_all boolean;
      froms pg_snapshot[];
      tos pg_snapshot[];
      settled bigint[];
      revisions int[];
      delivered bigint;
      window_low bigint;
      window_high bigint;
      ahead xid8;
      all_ahead xid8;
      all_opened xid8;
      all_passed xid8;
      had_running boolean;
      late xid8[];
      has_rows boolean;
      dead bigint;
      discarded bigint;
      has_marks boolean;
      topics text[];
      counts bigint[];
      sinces timestamptz[];
      looked bigint;
      first_seq bigint;
      last_seq bigint;
      passed_before xid8;
      xid_low xid8;
      xid_high xid8;
      kept_from bigint := (SELECT g.kept_from FROM {s}.log AS g WHERE g.name = '{name}');
      candidates bigint[];
      passed_low bigint;
      passed_high bigint;
      has_passages boolean;
      has_sent boolean;
      has_unrouted boolean;
    BEGIN
      FOR of_name, of_subscription, lane_count, of_revision, takes_all, topic_likes, of_tenant, of_kinds, of_aggregates, of_headers IN
        SELECT s.name, s.id, s.lanes::int, s.revision, {wants_everything},
          CASE WHEN s.topics <> '{}' THEN ARRAY(SELECT {like_of_topic} FROM unnest(s.topics) AS wanted(topic)) END,
          s.tenant, nullif(s.kinds, '{}'), nullif(s.aggregates, '{}'), s.headers
        FROM {s}.subscription AS s WHERE s.name = ANY (subscription_names)
      LOOP
        SELECT coalesce(sum(greatest(0, least(n.delivered, 1000000000000000))), 0)::bigint, array_agg(n.from_snap ORDER BY of_lane), array_agg(n.to_snap ORDER BY of_lane),
            array_agg(n.last_seq ORDER BY of_lane), array_agg(n.revision ORDER BY of_lane),
            min(greatest(n.low, n.last_seq)) FILTER (WHERE n.last_seq < n.high), max(n.high) FILTER (WHERE n.last_seq < n.high),
            min(pg_snapshot_xmax(n.to_snap)), max(pg_snapshot_xmax(n.to_snap)), min(pg_snapshot_xmin(n.to_snap)), min(pg_snapshot_xmin(n.from_snap)),
            coalesce(bool_or(pg_snapshot_xmin(n.from_snap) <> pg_snapshot_xmax(n.from_snap) OR pg_snapshot_xmin(n.to_snap) <> pg_snapshot_xmax(n.to_snap)), false),
            max(pg_snapshot_xmax(n.from_snap)), min(n.low), max(n.last_seq)
          INTO delivered, froms, tos, settled, revisions, window_low, window_high, ahead, all_ahead, all_opened, all_passed, had_running, passed_before, passed_low, passed_high
          FROM generate_series(0, lane_count - 1) AS of_lane
          LEFT JOIN {s}.lane AS n ON n.subscription = of_subscription AND n.lane = of_lane;
        RETURN QUERY SELECT of_name, 'dispatched', NULL::text, delivered, NULL::bigint, false;

        has_rows := EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = of_subscription);
        IF has_rows THEN
          -- A range of one state. Written this way, only an index on the state can be used, however
          -- few states the statistics know.
          SELECT (SELECT count(*) FROM (SELECT FROM {s}.delivery AS d
              WHERE d.subscription = of_subscription AND d.state >= 'dead' AND d.state <= 'dead' ORDER BY d.state, d.seq LIMIT look_max) AS d),
            (SELECT count(*) FROM (SELECT FROM {s}.delivery AS d
              WHERE d.subscription = of_subscription AND d.state >= 'discarded' AND d.state <= 'discarded' ORDER BY d.state, d.seq LIMIT look_max) AS d)
            INTO dead, discarded;
          RETURN QUERY SELECT of_name, r.state, NULL::text, r.events, NULL::bigint, false
            FROM (VALUES ('dead', dead), ('discarded', discarded)) AS r(state, events) WHERE r.events > 0;
          -- An event that was deleted from the log has no topic; it waits since its row last
          -- changed.
          RETURN QUERY SELECT of_name, r.state, r.topic, count(*), {age_of_oldest}, false
            FROM (
              SELECT waiting.state, coalesce(l.topic, '') AS topic,
                greatest(coalesce(l.created_at, d.updated_at), l.deliver_at, CASE waiting.state WHEN 'scheduled' THEN d.due_at END) AS since
              FROM (VALUES ('retrying'), ('blocked'), ('scheduled')) AS waiting(state)
              CROSS JOIN LATERAL (
                SELECT d.seq, d.updated_at, d.due_at FROM {s}.delivery AS d
                WHERE d.subscription = of_subscription AND d.state >= waiting.state AND d.state <= waiting.state
                ORDER BY d.state, d.seq LIMIT look_max OFFSET 0) AS d
              LEFT JOIN {log} AS l ON l.seq = d.seq) AS r
            GROUP BY r.state, r.topic;
        END IF;

        -- Only an operator's mark can be on an event that is not read yet.
        has_marks := has_rows AND EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = of_subscription AND {is_mark});
        late := CASE WHEN had_running THEN ARRAY(
          SELECT DISTINCT running.xid FROM {s}.lane AS n
          CROSS JOIN LATERAL (SELECT pg_snapshot_xip(n.from_snap) UNION ALL SELECT pg_snapshot_xip(n.to_snap)) AS running(xid)
          WHERE n.subscription = of_subscription AND pg_visible_in_snapshot(running.xid, pg_current_snapshot())) ELSE '{}' END;
        -- Unread events are in one of three places: in an open window, after all windows, or in a
        -- transaction that was running at the edge of a window. Each is a walk of an index. The
        -- limit is on what is read, not on what is found, because otherwise a rare topic would walk
        -- the whole log. Rows of a transaction that still runs count towards no limit, so the walk
        -- after all windows leaves its id out.
        xid_low := ahead;
        xid_high := greatest(ahead, pg_snapshot_xmax(pg_current_snapshot()));
        SELECT sum(t.looked), min(t.first_seq), array_agg(t.topic), array_agg(t.events), array_agg(t.since)
          INTO looked, first_seq, topics, counts, sinces
          FROM (
            SELECT e.topic, count(*) AS looked, min(e.seq) AS first_seq,
              count(*) FILTER (WHERE e.is_unread) AS events, min(e.since) FILTER (WHERE e.is_unread AND isfinite(e.since)) AS since
            FROM (
              SELECT l.seq, l.topic, greatest(l.created_at, l.deliver_at) AS since,
                CASE l.place WHEN 'window' THEN {is_left_of_window} WHEN 'ahead' THEN {is_ahead} ELSE {is_left} END AND {is_meant_to_go} AS is_unread
              FROM (
                (SELECT {looked_at}, 'window' AS place FROM {log} AS l
                  WHERE l.seq > window_low AND l.seq <= window_high ORDER BY l.seq LIMIT look_max)
                UNION ALL
                (SELECT l.*, 'ahead' FROM {between_running} AS gap
                  CROSS JOIN LATERAL (
                    SELECT {looked_at} FROM {log} AS l
                    WHERE l.xid > gap.low AND l.xid < gap.high ORDER BY l.xid, l.seq LIMIT look_max OFFSET 0) AS l
                  LIMIT look_max)
                UNION ALL
                (SELECT l.*, 'late' FROM unnest(late) AS ended(xid)
                  CROSS JOIN LATERAL (
                    SELECT {looked_at} FROM {log} AS l
                    WHERE l.xid >= ended.xid AND l.xid <= ended.xid ORDER BY l.xid, l.seq LIMIT look_max OFFSET 0) AS l)
                LIMIT look_max) AS l) AS e
            GROUP BY e.topic) AS t;
        IF looked < look_max THEN
          RETURN QUERY SELECT of_name, 'pending', r.topic, r.events, {age_of_oldest}, false
            FROM unnest(topics, counts, sinces) AS r(topic, events, since) WHERE r.events > 0
            GROUP BY r.topic, r.events;
        ELSIF looked >= look_max THEN
          -- Too many: blocks of places, sampled from equal parts of the range between the first row
          -- read and the end. The estimate divides by places rather than rows, so that gaps are
          -- accounted for.
          -- The newest transaction may have appended before a larger, older one ended, so one row
          -- is not enough.
          xid_low := '1';
          SELECT max(l.seq) INTO last_seq FROM {between_running} AS gap
            CROSS JOIN LATERAL (
              SELECT l.seq FROM {log} AS l
              WHERE l.xid > gap.low AND l.xid < gap.high ORDER BY l.xid DESC, l.seq DESC LIMIT 100 OFFSET 0) AS l;
          RETURN QUERY SELECT of_name, 'pending', NULL::text, 0::bigint, NULL::bigint, true;
          RETURN QUERY SELECT of_name, 'pending', coalesce(r.topic, sampled.topic), greatest(r.events, sampled.events), {age_of_oldest}, true
            FROM unnest(topics, counts, sinces) AS r(topic, events, since)
            FULL JOIN (
              SELECT l.topic, round(count(*) * ((last_seq - first_seq + 1)::float8 / (blocks * 32)))::bigint AS events
              FROM {sample} WHERE {is_left} AND {is_meant_to_go} GROUP BY l.topic) AS sampled ON sampled.topic = r.topic
            WHERE greatest(r.events, sampled.events) > 0
            GROUP BY coalesce(r.topic, sampled.topic), greatest(r.events, sampled.events);
        END IF;

        -- Events that were passed and not wanted. There are none if everything is wanted, and
        -- nothing was passed with another filter or lies before the subscription's start.
        has_passages := EXISTS (SELECT FROM {s}.passage AS p WHERE p.subscription = of_subscription);
        CONTINUE WHEN takes_all AND NOT has_passages AND of_revision = ALL (revisions);
        has_sent := EXISTS (SELECT FROM {s}.sent AS t WHERE t.subscription = of_subscription);
        has_unrouted := EXISTS (SELECT FROM {s}.unrouted AS u WHERE u.log = '{name}');
        -- Candidates are the rows written before the windows, and the settled part of the windows.
        -- The newest first, and none before `kept_from`: while anyone holds a snapshot, the entries
        -- of deleted events remain in the indexes. If little else was passed, the walk comes to
        -- them, but it reads no row of theirs; so it is done once.
        xid_low := '1';
        xid_high := passed_before;
        SELECT count(*), max(l.seq), array_agg(l.seq) INTO looked, last_seq, candidates FROM (
          (SELECT l.seq FROM (SELECT gap.low, gap.high FROM {between_running} AS gap ORDER BY gap.low DESC) AS gap
            CROSS JOIN LATERAL (
              SELECT l.seq FROM {log} AS l
              WHERE l.xid > gap.low AND l.xid < gap.high AND l.seq >= kept_from ORDER BY l.xid DESC, l.seq DESC LIMIT look_max OFFSET 0) AS l
            LIMIT look_max)
          UNION ALL
          (SELECT l.seq FROM {log} AS l
            WHERE l.seq > passed_low AND l.seq >= kept_from AND l.seq <= passed_high ORDER BY l.seq DESC LIMIT look_max)
          LIMIT look_max) AS l;
        IF looked < look_max THEN
          RETURN QUERY SELECT of_name, 'skipped', NULL::text, count(*), NULL::bigint, false
            FROM (SELECT {looked_at} FROM {log} AS l WHERE l.seq = ANY (candidates)) AS l
            WHERE {is_skipped};
        ELSE
          SELECT l.seq INTO first_seq FROM {log} AS l WHERE l.seq >= kept_from ORDER BY l.seq LIMIT 1;
          last_seq := greatest(last_seq, passed_high);
          RETURN QUERY SELECT of_name, 'skipped', NULL::text, round(count(*) * ((last_seq - first_seq + 1)::float8 / (blocks * 32)))::bigint, NULL::bigint, true
            FROM {sample} WHERE {is_skipped};
        END IF;
      END LOOP;
    END
    ${tag}_body$
  ${tag}_ddl$, '{tag}_log', log_name);
END
${tag}$;
