-- Moves the position of a lane, and locks the lane's row. Every writer of a lane's delivery rows
-- takes this lock first, so that nobody decides which row of a key is next while others change its
-- rows.
--
-- The parameters: the lane under an epoch; where its row was last seen; the window, the filter's
-- revision and the position that the caller remembers; the new position, or NULL to move nothing;
-- and how many of the events up to it were delivered.
--
-- The `verdict`:
--   stale    the lease is not ours
--   undone   the cursor is not what the caller remembers, and nothing was moved
--   written  the position was reached before: an earlier call whose answer was lost wrote this same
--            settlement, and the rows it left may have gone on since
--   open     the lane is locked, and the position is the requested one
--
-- The position moves only in the window it belongs to, only from where the settled part ends, and
-- only with the filter it was read with. After a failover that lost the window, the same number
-- would pass events of the previous window. After one that lost a settlement, it would pass the
-- events whose rows went with it. After one that lost a change of the filter, it would pass events
-- that are wanted again. A window that the caller does not know never matches. Due rows are
-- identified by their `seq`, which a database that went back may have given to another event. They
-- too are settled only while the cursor is the one that the caller knows, or a later one that the
-- caller's own reading opened meanwhile. docs/cursor.md, writes W2 and W4.
--
-- Every settlement leaves an old version of the row. While any session holds a snapshot, none of
-- them can be removed, and a lookup by key reads them all: 1 ms after 20,000 batches (measured),
-- and growing. So the row is first looked for at its last ctid.
CREATE FUNCTION {s}.settle_lane(
  of_subscription int, of_lane int, under_epoch bigint, last_place text, last_snap text, last_revision int, last_settled bigint, new_seq bigint,
  now_delivered bigint,
  OUT verdict text, OUT place text)
LANGUAGE plpgsql VOLATILE {pinned}
AS ${tag}$
DECLARE
  spot tid := last_place::tid;
  at record;
  known boolean;
BEGIN
  -- Everything was delivered, the usual case: one update, without a lock that would be written
  -- before it.
  UPDATE {s}.lane AS l SET last_seq = new_seq, delivered = least(l.delivered, 1000000000000000) + now_delivered
    WHERE l.ctid = spot AND {held}
      AND l.to_snap::text = last_snap AND l.last_seq >= last_settled AND l.last_seq < new_seq AND l.revision = last_revision
    RETURNING l.ctid::text INTO place;
  IF FOUND THEN
    verdict := 'open';
    RETURN;
  END IF;
  SELECT l.ctid, l.to_snap, l.last_seq, l.revision INTO at FROM {s}.lane AS l
    WHERE l.ctid = spot AND {held} FOR NO KEY UPDATE;
  IF NOT FOUND THEN
    SELECT l.ctid, l.to_snap, l.last_seq, l.revision INTO at FROM {s}.lane AS l
      WHERE {held} FOR NO KEY UPDATE;
  END IF;
  place := at.ctid::text;
  known := coalesce(at.to_snap::text = last_snap AND at.last_seq >= last_settled, false);
  IF NOT known AND new_seq IS NULL THEN
    -- A later snapshot sees all that the remembered one sees. An earlier one never does.
    known := last_snap IS NULL OR at.to_snap::text <> last_snap
      AND pg_snapshot_xmax(at.to_snap) >= pg_snapshot_xmax(last_snap::pg_snapshot)
      AND NOT EXISTS (SELECT FROM pg_snapshot_xip(at.to_snap) AS running(xid)
        WHERE pg_visible_in_snapshot(running.xid, last_snap::pg_snapshot));
  END IF;
  IF place IS NULL THEN
    verdict := 'stale';
  ELSIF NOT known THEN
    verdict := 'undone';
  ELSIF at.last_seq >= new_seq THEN
    verdict := 'written';
  ELSIF new_seq IS NOT NULL AND at.revision <> last_revision THEN
    verdict := 'undone';
  ELSE
    verdict := 'open';
    IF new_seq IS NOT NULL THEN
      UPDATE {s}.lane AS l SET last_seq = new_seq, delivered = least(l.delivered, 1000000000000000) + now_delivered WHERE l.ctid = at.ctid RETURNING l.ctid::text INTO place;
    END IF;
  END IF;
END
${tag}$;

-- The id of this cluster: transaction ids of another mean nothing here. PUBLIC may execute it. Not
-- STABLE, and without FROM: so the planner puts it inline, which spares each window 0.1 ms.
CREATE FUNCTION {s}.cluster_id() RETURNS bigint LANGUAGE sql AS ${tag}$
  SELECT (pg_catalog.pg_control_system()).system_identifier
${tag}$;
