-- What an operator sees without the binary: states, counts and dead events, in the words of
-- `postbox stats`, `show` and `list`. The views read with the rights of their caller.

-- Costs the same at any size: see `depth`. All subscriptions share one limit of rows to read.
CREATE VIEW {s}.stats WITH (security_invoker = true) AS
SELECT s.name AS subscription, s.log, c.retrying + c.blocked + c.scheduled + c.unread AS pending, c.retrying, c.blocked, c.scheduled, c.dead, c.discarded,
  c.dispatched, c.skipped, c.estimated OR greatest(c.retrying, c.blocked, c.scheduled, c.dead, c.discarded) > share.events AS estimated,
  c.skipped_estimated,
  c.oldest_pending_seconds, s.lanes::int AS lanes,
  (SELECT count(*)::int FROM {s}.lane AS n WHERE n.subscription = s.id AND n.lease_until > clock_timestamp()) AS lanes_held,
  CASE WHEN {is_paused} THEN s.paused_by END AS paused_by,
  CASE WHEN {is_paused} THEN s.paused_why END AS paused_why,
  CASE WHEN {is_paused} THEN s.paused_until END AS paused_until
FROM {s}.subscription AS s
CROSS JOIN (SELECT greatest(10000 / nullif(count(*), 0), 500) AS events FROM {s}.subscription) AS share
CROSS JOIN LATERAL (
  SELECT coalesce(sum(d.events) FILTER (WHERE d.state = 'pending'), 0)::bigint AS unread,
    coalesce(sum(d.events) FILTER (WHERE d.state = 'retrying'), 0)::bigint AS retrying,
    coalesce(sum(d.events) FILTER (WHERE d.state = 'blocked'), 0)::bigint AS blocked,
    coalesce(sum(d.events) FILTER (WHERE d.state = 'scheduled'), 0)::bigint AS scheduled,
    coalesce(sum(d.events) FILTER (WHERE d.state = 'dead'), 0)::bigint AS dead,
    coalesce(sum(d.events) FILTER (WHERE d.state = 'discarded'), 0)::bigint AS discarded,
    coalesce(sum(d.events) FILTER (WHERE d.state = 'dispatched'), 0)::bigint AS dispatched,
    coalesce(sum(d.events) FILTER (WHERE d.state = 'skipped'), 0)::bigint AS skipped,
    bool_or(d.is_estimate AND d.state <> 'skipped') AS estimated,
    coalesce(bool_or(d.is_estimate) FILTER (WHERE d.state = 'skipped'), false) AS skipped_estimated,
    round(max(CASE WHEN d.age < 0 THEN 0 ELSE d.age END) / 1000000.0, 3)::float8 AS oldest_pending_seconds
  FROM {s}.depth(s.name, share.events + 1) AS d) AS c;

-- Creates the views of a log. `<log>_state` has a row for each event and subscription. `<log>_dead`
-- has a row for each dead event, found without walking the log.
CREATE FUNCTION {s}.create_views(log_name text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  EXECUTE replace(${tag}_ddl$
    CREATE VIEW {s}."{tag}_log_state" WITH (security_invoker = true) AS
    SELECT o.name AS subscription, l.id, l.topic, l.key, {state} AS state, coalesce(d.attempts, 0) AS attempts, coalesce(d.replays, 0) AS replays,
      d.due_at, d.code, d.error, d.updated_at, l.created_at
    FROM {log} AS l
    JOIN {s}.subscription AS o ON o.log = '{name}'
    JOIN {s}.lane AS n ON n.subscription = o.id AND n.lane = l.slot % o.lanes
    LEFT JOIN {s}.delivery AS d ON d.subscription = o.id AND d.seq = l.seq;

    CREATE VIEW {s}."{tag}_log_dead" WITH (security_invoker = true) AS
    SELECT o.name AS subscription, l.id, l.topic, l.key, d.attempts, d.replays, d.code, d.error, d.last_attempts, d.updated_at, l.created_at,
      l.tenant, l.headers, l.content_type, l.payload, l.payload_bytes
    FROM {s}.subscription AS o
    JOIN {s}.delivery AS d ON d.subscription = o.id AND d.state = 'dead'
    LEFT JOIN {log} AS l ON l.seq = d.seq
    WHERE o.log = '{name}';
  ${tag}_ddl$, '{tag}_log', log_name);
  PERFORM {s}.comment_log(log_name);
END
${tag}$;
