-- How a lane reads: a page of its window, or the search for new rows and the first page of the next
-- window, with the write of the cursor. Each is one call.
--
-- It runs in the database because of where the time was spent. As separate statements it took four
-- round trips, and the server spent ten times longer on planning than on running them. A function
-- keeps its plans, even behind a pooler, where prepared statements do not survive. There is one
-- function per log, because a plan is kept for one table.

-- Creates the function `<log>_window` of a log. Idempotent.
--
-- The parameters: the largest payload to read inline; the most rows (0: only the verdict); what the
-- lane and its subscription want; the lane under an epoch; the filter's revision; where the lane's
-- row was last seen; the window and the position that the caller remembers; the place to read on
-- after in that window, or NULL to look for the next one; how many places to look at; whether a
-- few new rows of which the lane wants none may be left for a later call; and, if everything of the
-- window was delivered but is not settled yet, its last position and the number of these events.
-- The next window then settles it.
--
-- The result: rows in two runs of `seq` order (stragglers, then the others), and a last row without
-- `seq`, whose `verdict` is the outcome of the call:
--   stale    the lease is not ours, or this is a standby, which may lack rows of a window that was
--            settled
--   undone   the cursor is not what the caller remembers: a crash or a failover took it back, or an
--            earlier call whose answer was lost moved it on
--   changed  the subscription's filter, the filter that the lane reads by, or the number of lanes
--            is not the one that the caller passed
--   page     rows of the window; nothing was written
--   nothing  nothing was committed since the window ended, or nothing that the lane wants; nothing
--            was written
--   window   the next window is open and written; it may hold nothing that is wanted
-- `low`, `high` and `xid_low` bound the rows of a window without stragglers. Its further pages can
-- then be read without this function, which collects its rows before returning them and costs a
-- third more (measured). `left_stream`: the subscription has delivery rows. `looked`: the window
-- was looked through up to here only (without rows: up to the next row of it). A call looks at a
-- bounded number of places, whatever it finds: with a filter that few events pass it would
-- otherwise not end in time, and begin again at the same one.
--
-- A cursor that was made in another cluster, whose transaction ids mean nothing here, raises an
-- error with the state PB001.
--
-- The planner is pinned. Without statistics it believes that a LIMIT is cheap to reach by a
-- sequential scan, a hash join or a sort. Each of these reads the whole table (measured: 3 to 250
-- times slower). One plan is kept for all parameters, because no choice of an index depends on
-- them.
CREATE FUNCTION {s}.create_window(log_name text) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  EXECUTE replace(${tag}_ddl$
    CREATE OR REPLACE FUNCTION {s}.{tag}_log_window(
      inline_max int, rows_max bigint, of_lane int, lane_count int, topic_likes text[], of_tenant text,
      of_kinds text[], of_aggregates text[], of_headers jsonb, of_subscription int, under_epoch bigint, under_revision int,
      last_place text, last_snap text, last_settled bigint, read_after bigint, look_max bigint, may_stay boolean,
      settle_to bigint, now_delivered bigint)
    RETURNS TABLE ({column_types},
      verdict text, left_stream boolean, place text, window_to text, low bigint, high bigint, xid_low text, looked bigint)
    LANGUAGE plpgsql VOLATILE {pinned}
    AS ${tag}_body$
    #variable_conflict use_column
    DECLARE
      spot tid := last_place::tid;
      at record;
      old_snap pg_snapshot;
      new_snap pg_snapshot;
      after_seq bigint := coalesce(read_after, 0);
      window_low bigint;
      window_high bigint;
      window_rows bigint;
      window_passed bigint;
      -- What the new snapshot sees was committed before this place of the write-ahead log.
      seen_lsn pg_lsn;
      edges xid8[];
      -- The first of the stragglers, and the last place that this call looks at.
      late_low bigint;
      look_to bigint;
      ended xid8[];
      given bigint := 0;
      stragglers bigint := 0;
      news boolean := read_after IS NOT NULL;
      is_native boolean;
    BEGIN
      -- By ctid first. While any session holds a snapshot, old versions of the row cannot be
      -- removed, and a lookup by key reads all of them.
      SELECT l.ctid, l.from_snap, l.to_snap, l.low, l.high, l.last_seq, l.revision INTO at FROM {s}.lane AS l
        WHERE l.ctid = spot AND {held};
      IF NOT FOUND THEN
        SELECT l.ctid, l.from_snap, l.to_snap, l.low, l.high, l.last_seq, l.revision INTO at FROM {s}.lane AS l
          WHERE {held};
      END IF;
      IF at.ctid IS NULL OR pg_is_in_recovery() THEN
        verdict := 'stale';
        RETURN NEXT;
        RETURN;
      END IF;
      place := at.ctid::text;
      IF at.revision <> under_revision
         OR NOT EXISTS (SELECT FROM {s}.subscription AS s
           WHERE s.id = of_subscription AND s.revision = under_revision AND s.lanes = lane_count) THEN
        verdict := 'changed';
        RETURN NEXT;
        RETURN;
      END IF;
      left_stream := EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = of_subscription);
      IF at.to_snap::text <> last_snap OR at.last_seq < last_settled THEN
        verdict := 'undone';
        RETURN NEXT;
        RETURN;
      END IF;
      IF rows_max = 0 THEN
        -- The caller reads the rows from the log itself, in this transaction.
        verdict := 'page';
        RETURN NEXT;
        RETURN;
      END IF;

      -- The window: rows that the old snapshot does not see and the new one does.
      IF read_after IS NOT NULL THEN
        old_snap := at.from_snap;
        new_snap := at.to_snap;
        window_low := greatest(at.low, read_after);
        window_high := at.high;
      ELSE
        old_snap := at.to_snap;
        new_snap := pg_current_snapshot();
        IF new_snap::text = last_snap THEN
          -- Nobody has written anything: most calls of an idle lane.
          verdict := 'nothing';
          RETURN NEXT;
          RETURN;
        END IF;
        seen_lsn := pg_current_wal_insert_lsn();
      END IF;
      ended := ARRAY(SELECT running.xid FROM pg_snapshot_xip(old_snap) AS running(xid)
        WHERE pg_visible_in_snapshot(running.xid, new_snap));
      IF read_after IS NOT NULL THEN
        NULL;
      ELSIF pg_snapshot_xmax(old_snap) <= '1' THEN
        -- The very first window contains everything in the log, so its bounds need no search.
        window_low := 0;
        window_high := 9223372036854775807;
      ELSE
        -- The bounds come from the rows, not from a sequence. A snapshot's xmax is the latest ended
        -- transaction plus one, so transactions above it may already hold lower numbers than any
        -- bound we could name. The ranges leave out transactions that still run, so that nobody
        -- reads what a large one has written so far. `OFFSET 0`, because a plain min(seq) over a
        -- range of xid becomes a walk of the primary key from its start.
        -- Ascending, as a snapshot lists them and as ids grow within a cluster.
        edges := (pg_snapshot_xmax(old_snap)::text::numeric - 1)::text::xid8
          || ARRAY(SELECT running.xid FROM pg_snapshot_xip(new_snap) AS running(xid) WHERE running.xid >= pg_snapshot_xmax(old_snap))
          || pg_snapshot_xmax(new_snap);
        SELECT min(seen.seq) - 1, max(seen.seq), count(*) INTO window_low, window_high, window_rows FROM (
          SELECT seen.seq FROM unnest(edges[:cardinality(edges) - 1], edges[2:]) AS gap(low, high)
          CROSS JOIN LATERAL (
            SELECT x.seq FROM {s}."{tag}_log" AS x WHERE x.xid > gap.low AND x.xid < gap.high ORDER BY x.xid, x.seq OFFSET 0
          ) AS seen
          LIMIT 25 * look_max + 1) AS seen;
        IF window_rows > 25 * look_max THEN
          -- To read them all would take too long; a walk from the beginning needs no bounds.
          window_low := 0;
          window_high := 9223372036854775807;
        END IF;
      END IF;

      -- (a) The stragglers: rows of transactions that were running when the window began, found
      -- from the list of those transactions. A range of one id instead of an equality. With an
      -- equality the order by seq alone could come from the primary key, and a planner that has
      -- seen one large transaction walks it (150 ms in a log of 600,000 rows). A separate
      -- statement, because in one statement with (b) the planner walks the whole primary key for
      -- this half (20 times slower).
      IF cardinality(ended) > 0 THEN
        late_low := (SELECT min(hit.seq) - 1 FROM unnest(ended) AS running(xid) CROSS JOIN LATERAL (
          SELECT l.seq FROM {s}."{tag}_log" AS l WHERE l.xid >= running.xid AND l.xid <= running.xid AND l.seq > after_seq
          ORDER BY l.xid, l.seq LIMIT 1 OFFSET 0) AS hit);
        news := news OR late_low IS NOT NULL;
      END IF;
      look_to := least(late_low, CASE WHEN window_low < window_high THEN window_low END, 9223372036854775807 - look_max) + look_max;
      IF late_low IS NOT NULL THEN
        RETURN QUERY SELECT late.*, NULL::text, NULL::boolean, NULL::text, NULL::text, NULL::bigint, NULL::bigint, NULL::text, NULL::bigint
          FROM unnest(ended) AS running(xid)
          CROSS JOIN LATERAL (
            SELECT {columns} FROM {s}."{tag}_log" AS l
            WHERE l.xid >= running.xid AND l.xid <= running.xid AND l.seq > late_low AND l.seq <= look_to AND {wanted}
            ORDER BY l.xid, l.seq LIMIT rows_max OFFSET 0
          ) AS late
          ORDER BY late.seq LIMIT rows_max;
        GET DIAGNOSTICS stragglers = ROW_COUNT;
      END IF;
      -- (b) All other rows: a walk of the primary key between two bounds. By seq rather than xid,
      -- because a transaction with an early id that writes late would come before the events that
      -- it follows.
      IF window_low < window_high THEN
        RETURN QUERY SELECT {columns}, NULL::text, NULL::boolean, NULL::text, NULL::text, NULL::bigint, NULL::bigint, NULL::text, NULL::bigint
          FROM {s}."{tag}_log" AS l
          WHERE l.seq > window_low AND l.seq <= least(window_high, look_to) AND l.xid >= pg_snapshot_xmax(old_snap)
            AND pg_visible_in_snapshot(l.xid, new_snap) AND {wanted}
          ORDER BY l.seq LIMIT rows_max;
        GET DIAGNOSTICS given = ROW_COUNT;
        news := true;
      END IF;
      IF (look_to < window_high OR late_low IS NOT NULL) AND given < rows_max AND stragglers < rows_max THEN
        looked := least(
          (SELECT l.seq - 1 FROM {s}."{tag}_log" AS l WHERE l.seq > greatest(look_to, window_low) AND l.seq <= window_high ORDER BY l.seq LIMIT 1),
          (SELECT min(hit.seq) - 1 FROM unnest(ended) AS running(xid) CROSS JOIN LATERAL (
            SELECT l.seq FROM {s}."{tag}_log" AS l WHERE l.xid >= running.xid AND l.xid <= running.xid AND l.seq > look_to
            ORDER BY l.xid, l.seq LIMIT 1 OFFSET 0) AS hit));
        -- Without rows, the next call begins at the next one. With rows, it begins where this one
        -- ends, because the caller settles up to there.
        IF looked IS NOT NULL AND given + stragglers > 0 THEN
          looked := look_to;
        END IF;
      END IF;
      -- With several lanes or a narrow filter, most windows would hold nothing for the lane. Each
      -- would cost a write and another call, and the write would make the next window of another
      -- lane wait for the disk.
      IF may_stay AND read_after IS NULL AND given = 0 AND late_low IS NULL AND looked IS NULL AND window_rows <= 100 THEN
        news := false;
      END IF;
      IF news AND cardinality(ended) = 0 THEN
        low := coalesce(CASE WHEN read_after IS NULL THEN window_low ELSE at.low END, 0);
        high := coalesce(window_high, 0);
        xid_low := pg_snapshot_xmax(old_snap)::text;
      END IF;
      IF read_after IS NOT NULL OR NOT news THEN
        verdict := CASE WHEN news THEN 'page' ELSE 'nothing' END;
        RETURN NEXT;
        RETURN;
      END IF;

      -- Rows of the window may come from a producer with `synchronous_commit = off` and not be on
      -- disk yet. Handed out and then lost in a crash, they would be phantoms. So the cursor is
      -- committed durably before anything in the window counts. This commit comes after all these
      -- rows in the write-ahead log, and flushes them. It need not wait if all that the window sees
      -- is flushed already and no standby has to confirm, or if nothing is handed out: a crash that
      -- undoes this write undoes it for the next call too. What it settles may then be sent again,
      -- but not together with the pages that are read ahead in this window.
      IF given + stragglers = 0 AND looked IS NULL AND settle_to IS NULL
         OR (seen_lsn <= pg_current_wal_flush_lsn() AND current_setting('synchronous_standby_names') = ''
           AND (settle_to IS NULL OR given + stragglers < rows_max)) THEN
        PERFORM set_config('synchronous_commit', 'off', true);
      ELSIF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
      END IF;
      window_low := coalesce(window_low, 0);
      window_high := coalesce(window_high, 0);
      -- A window without events for the lane is passed at once, except one without a known end.
      window_passed := CASE WHEN given + stragglers = 0 AND looked IS NULL AND window_high < 9223372036854775807
        THEN window_high ELSE 0 END;
      -- Conditional on the very cursor that was read, not only on the epoch. This call may complete
      -- after its caller gave up and asked again under the same epoch. A second window opened over
      -- the first would skip the first unread. The ctid protects nothing, because an UPDATE by ctid
      -- follows a concurrent update to the new row. docs/cursor.md, write W1.
      UPDATE {s}.lane AS l
        SET from_snap = at.to_snap, to_snap = new_snap, low = window_low, high = window_high, last_seq = window_passed,
          delivered = CASE WHEN settle_to > l.last_seq THEN least(l.delivered, 1000000000000000) + now_delivered ELSE l.delivered END
        WHERE l.ctid = at.ctid AND {held} AND l.to_snap::text = last_snap AND l.revision = under_revision
        RETURNING l.ctid::text, l.cluster = {s}.cluster_id() INTO place, is_native;
      -- Since it was read, the row may have moved by a renewal, or have been taken over.
      IF place IS NULL THEN
        UPDATE {s}.lane AS l
          SET from_snap = at.to_snap, to_snap = new_snap, low = window_low, high = window_high, last_seq = window_passed,
            delivered = CASE WHEN settle_to > l.last_seq THEN least(l.delivered, 1000000000000000) + now_delivered ELSE l.delivered END
          WHERE {held} AND l.to_snap::text = last_snap AND l.revision = under_revision
          RETURNING l.ctid::text, l.cluster = {s}.cluster_id() INTO place, is_native;
      END IF;
      IF NOT is_native THEN
        -- Nothing of this transaction may stay: the cursor belongs to another cluster.
        RAISE EXCEPTION 'the cursor was made in another cluster' USING ERRCODE = 'PB001';
      END IF;
      verdict := CASE WHEN place IS NOT NULL THEN 'window' ELSE 'undone' END;
      window_to := new_snap::text;
      RETURN NEXT;
    END
    ${tag}_body$
  ${tag}_ddl$, '{tag}_log', log_name);
END
${tag}$;
