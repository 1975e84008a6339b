-- How a lane finds its next window: the look for news, the first page and the write of the cursor, in one call.
--
-- In the database, because of where the time went: as separate statements this took four round trips, and the server spent ten times longer
-- on planning them than on running them. A function keeps its plans, also behind a pooler, where a prepared statement cannot live.
-- One function a log, because a plan is kept for one table.

-- Makes the function `<log>_window` of a log. Idempotent.
--
-- The parameters: the lane under an epoch; the filter's revision; where the lane's row was last seen and what the caller remembers of it; the largest payload to send along;
-- the most rows; then what the subscription wants. The answer: rows of the window's first page in two runs of `seq` order (stragglers, then
-- the rest), and one row at the end without `seq`, whose `verdict` says what came of the call:
--   stale    the lease is not ours, or this is a standby, which may lack rows of a window that is settled as read
--   undone   the cursor is not what the caller remembers: a crash or a failover took it back, or an earlier call
--            whose answer was lost moved it on
--   changed  the subscription's filter is not the one the caller brings
--   nothing  nothing was committed since the window ended; nothing was written
--   window   the next window is open, and written down; perhaps nothing in it is wanted
-- `left_stream`: the subscription has delivery rows.
--
-- A cursor that was made in another cluster, whose transaction ids mean nothing here, is an error with the state PB001.
--
-- The planner is pinned. It believes that a LIMIT without statistics is cheap to reach by a sequential scan, a hash join or a sort; each of
-- these walks the whole table (3 to 250 times slower, measured). One plan is kept for all parameters: no index depends on them.
CREATE FUNCTION {s}.create_window(log_name text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS ${tag}$
BEGIN
  EXECUTE replace(replace(replace(replace(replace(replace(${tag}_ddl$
    CREATE OR REPLACE FUNCTION <schema>.<log>_window(
      of_subscription int, of_lane smallint, under_epoch bigint, under_revision int, last_place text, last_snap text, last_settled bigint,
      inline_max int, rows_max bigint, lane_count int, topic_likes text[], of_tenant text)
    RETURNS TABLE (
      seq bigint, id uuid, topic text, key text, aggregate text, version bigint, kind text, source text, tenant text,
      payload text, payload_bytes bytea, behind int, content_type text, headers text,
      occurred_at timestamptz, created_at timestamptz, deliver_at timestamptz,
      verdict text, left_stream boolean, place text, window_to text, window_low bigint, window_high bigint)
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog SET plan_cache_mode = force_generic_plan
    SET jit = off SET max_parallel_workers_per_gather = 0
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
    SET enable_sort = off SET enable_incremental_sort = off SET enable_material = off
    AS ${tag}_body$
    #variable_conflict use_column
    DECLARE
      spot tid := last_place::tid;
      at record;
      now_snap pg_snapshot;
      ended xid8[];
      given bigint := 0;
      stragglers bigint := 0;
      news boolean := false;
      is_native boolean;
    BEGIN
      -- By its place first: while anybody in the database holds a snapshot, no old version of the row can be removed, and a look-up by
      -- key walks over all of them.
      SELECT l.ctid, l.to_snap, l.last_seq INTO at FROM <schema>.lane AS l
        WHERE l.ctid = spot AND l.subscription = of_subscription AND l.lane = of_lane AND l.epoch = under_epoch
          AND l.lease_until > clock_timestamp();
      IF NOT FOUND THEN
        SELECT l.ctid, l.to_snap, l.last_seq INTO at FROM <schema>.lane AS l
          WHERE l.subscription = of_subscription AND l.lane = of_lane AND l.epoch = under_epoch
            AND l.lease_until > clock_timestamp();
      END IF;
      IF at.ctid IS NULL OR pg_is_in_recovery() THEN
        verdict := 'stale';
        RETURN NEXT;
        RETURN;
      END IF;
      IF NOT EXISTS (SELECT FROM <schema>.subscription AS s WHERE s.id = of_subscription AND s.revision = under_revision) THEN
        verdict := 'changed';
        RETURN NEXT;
        RETURN;
      END IF;
      left_stream := EXISTS (SELECT FROM <schema>.delivery AS d WHERE d.subscription = of_subscription);
      IF at.to_snap::text <> last_snap OR at.last_seq < last_settled THEN
        verdict := 'undone';
        RETURN NEXT;
        RETURN;
      END IF;

      now_snap := pg_current_snapshot();
      ended := ARRAY(SELECT running.xid FROM pg_snapshot_xip(at.to_snap) AS running(xid)
        WHERE pg_visible_in_snapshot(running.xid, now_snap));
      IF pg_snapshot_xmax(at.to_snap) <= '1' THEN
        -- The first window of all: everything in the log, so its bounds need not be looked for.
        window_low := 0;
        window_high := 9223372036854775807;
      ELSE
        -- The bounds come from the rows and not from a sequence: a snapshot's xmax is the latest ended transaction plus one, so that
        -- transactions above it may already hold lower numbers than any bound we could name. Transactions that still run are left out of the
        -- ranges, so that nobody walks what a large one has written so far. `OFFSET 0`: a plain min(seq) over a range of xid is turned
        -- into a walk of the primary key from its start.
        SELECT min(seen.seq) - 1, max(seen.seq) INTO window_low, window_high
          FROM (
            SELECT edge AS low, lead(edge) OVER (ORDER BY edge) AS high
            FROM (
              SELECT (pg_snapshot_xmax(at.to_snap)::text::numeric - 1)::text::xid8 AS edge
              UNION ALL SELECT running.xid FROM pg_snapshot_xip(now_snap) AS running(xid) WHERE running.xid >= pg_snapshot_xmax(at.to_snap)
              UNION ALL SELECT pg_snapshot_xmax(now_snap)
            ) AS edges
          ) AS gap
          CROSS JOIN LATERAL (
            SELECT x.seq FROM <schema>.<log> AS x WHERE x.xid > gap.low AND x.xid < gap.high ORDER BY x.xid, x.seq OFFSET 0
          ) AS seen;
      END IF;

      -- (a) The stragglers: rows of transactions that were running when the window began, driven from the list of those transactions. A range
      -- of one id instead of an equality: with that, the order by seq alone could come from the primary key, and a planner that has seen
      -- one large transaction walks it (150 ms in a log of 600,000 rows).
      IF cardinality(ended) > 0 THEN
        news := EXISTS (SELECT FROM unnest(ended) AS running(xid) CROSS JOIN LATERAL (
          SELECT FROM <schema>.<log> AS l WHERE l.xid >= running.xid AND l.xid <= running.xid ORDER BY l.xid, l.seq LIMIT 1 OFFSET 0) AS hit);
        IF news THEN
          RETURN QUERY SELECT late.*, NULL::text, NULL::boolean, NULL::text, NULL::text, NULL::bigint, NULL::bigint
            FROM unnest(ended) AS running(xid)
            CROSS JOIN LATERAL (
              SELECT <columns> FROM <schema>.<log> AS l
              WHERE l.xid >= running.xid AND l.xid <= running.xid AND <wanted>
              ORDER BY l.xid, l.seq LIMIT rows_max OFFSET 0
            ) AS late
            ORDER BY late.seq LIMIT rows_max;
          GET DIAGNOSTICS stragglers = ROW_COUNT;
        END IF;
      END IF;
      -- (b) The rest: a walk of the primary key between two bounds. By seq, not by xid: a transaction with an early id that writes late
      -- would come before what it follows.
      IF window_low IS NOT NULL THEN
        RETURN QUERY SELECT <columns>, NULL::text, NULL::boolean, NULL::text, NULL::text, NULL::bigint, NULL::bigint
          FROM <schema>.<log> AS l
          WHERE l.seq > window_low AND l.seq <= window_high AND l.xid >= pg_snapshot_xmax(at.to_snap)
            AND pg_visible_in_snapshot(l.xid, now_snap) AND <wanted>
          ORDER BY l.seq LIMIT rows_max;
        GET DIAGNOSTICS given = ROW_COUNT;
        news := true;
      END IF;
      IF NOT news THEN
        verdict := 'nothing';
        RETURN NEXT;
        RETURN;
      END IF;

      -- What a window sees may come from a producer with `synchronous_commit = off` and not be on disk yet: given out and then lost in a
      -- crash it would be a phantom. So the cursor is committed durably before anything of the window counts. Its commit is later in the
      -- write-ahead log than all the window can see, and takes it to disk. There is no need to wait where all of it is there already
      -- (and no standby has to have it), or where nothing is given out: a crash that takes this write back takes it back for the next look too.
      IF given + stragglers = 0
         OR (pg_current_wal_insert_lsn() <= pg_current_wal_flush_lsn() AND current_setting('synchronous_standby_names') = '') THEN
        PERFORM set_config('synchronous_commit', 'off', true);
      ELSIF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
      END IF;
      window_low := coalesce(window_low, 0);
      window_high := coalesce(window_high, 0);
      -- Conditional on the very cursor that was read, not on the epoch alone: this call may be done after its caller gave it up and asked
      -- again under the same epoch, and a second window opened over the first would drop the first unread. An UPDATE by ctid follows a
      -- concurrent one to the new row, so the place protects nothing. docs/cursor.md, write W1.
      UPDATE <schema>.lane AS l
        SET from_snap = at.to_snap, to_snap = now_snap, low = window_low, high = window_high, last_seq = 0
        WHERE l.ctid = at.ctid AND <mine>
        RETURNING l.ctid::text, l.cluster = <schema>.cluster_id() INTO place, is_native;
      -- Between the look and now the row can have been renewed, and so moved, or taken over.
      IF place IS NULL THEN
        UPDATE <schema>.lane AS l
          SET from_snap = at.to_snap, to_snap = now_snap, low = window_low, high = window_high, last_seq = 0
          WHERE <mine>
          RETURNING l.ctid::text, l.cluster = <schema>.cluster_id() INTO place, is_native;
      END IF;
      IF NOT is_native THEN
        -- Nothing of this transaction may stay: the cursor is one of another cluster.
        RAISE EXCEPTION 'the cursor was made in another cluster' USING ERRCODE = 'PB001';
      END IF;
      verdict := CASE WHEN place IS NOT NULL THEN 'window' ELSE 'undone' END;
      window_to := now_snap::text;
      RETURN NEXT;
    END
    ${tag}_body$
  ${tag}_ddl$, '<columns>', ${tag}_columns$
                l.seq, l.id, l.topic, l.key, l.aggregate, l.version, l.kind, l.source, l.tenant,
                CASE WHEN octet_length(l.payload) <= inline_max THEN l.payload END AS payload,
                CASE WHEN octet_length(l.payload_bytes) <= inline_max THEN l.payload_bytes END AS payload_bytes,
                CASE WHEN coalesce(octet_length(l.payload), octet_length(l.payload_bytes)) > inline_max
                  THEN coalesce(octet_length(l.payload), octet_length(l.payload_bytes)) END AS behind,
                l.content_type, l.headers::text AS headers, l.occurred_at, l.created_at, l.deliver_at
  ${tag}_columns$), '<wanted>', ${tag}_wanted$
    (lane_count = 1 OR l.slot % lane_count = of_lane) AND (topic_likes IS NULL OR l.topic LIKE ANY (topic_likes))
                AND (of_tenant IS NULL OR l.tenant = of_tenant)
  ${tag}_wanted$), '<mine>', ${tag}_mine$
          l.subscription = of_subscription AND l.lane = of_lane AND l.epoch = under_epoch AND l.lease_until > clock_timestamp()
          AND l.to_snap::text = last_snap
  ${tag}_mine$), '<log> ', quote_ident(log_name) || ' '), '<log>', log_name), '<schema>', {schema_literal});
END
${tag}$;
