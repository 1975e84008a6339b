//! The template language of our SQL: `{name}` stands for a text, `{=}` for an operator.
//!
//! `{s}` is the schema, `{log}` a log's table, `{<=}` Postgres's own `<=`. Anyone who may create
//! objects in a schema of our search_path could plant an operator that fits our arguments better. A
//! statement in one of our transactions has our search_path and may use plain operators. The other
//! names are [`FRAGMENTS`].

use std::sync::LazyLock;

use crate::append::APPEND_COLUMNS;

/// The columns of an event in the order in which the store reads them: name, type and value, from
/// a log called `l`. `$1` is the largest payload to read inline, in bytes.
///
/// A larger payload is left out, and only its size is read: `octet_length` of a stored value reads
/// only its header.
pub const EVENT_COLUMNS: [(&str, &str, &str); 19] = [
    ("seq", "bigint", "l.seq"),
    ("id", "uuid", "l.id"),
    ("topic", "text", "l.topic"),
    ("key", "text", "l.key"),
    ("aggregate", "text", "l.aggregate"),
    ("version", "bigint", "l.version"),
    ("kind", "text", "l.kind"),
    ("source", "text", "l.source"),
    ("tenant", "text", "l.tenant"),
    ("payload", "text", "CASE WHEN octet_length(l.payload) <= $1 THEN l.payload END"),
    ("payload_bytes", "bytea", "CASE WHEN octet_length(l.payload_bytes) <= $1 THEN l.payload_bytes END"),
    (
        "behind",
        "int",
        "CASE WHEN coalesce(octet_length(l.payload), octet_length(l.payload_bytes)) > $1 \
         THEN coalesce(octet_length(l.payload), octet_length(l.payload_bytes)) END",
    ),
    ("content_type", "text", "l.content_type"),
    ("headers", "text", "l.headers::text"),
    ("occurred_at", "timestamptz", "l.occurred_at"),
    ("created_at", "timestamptz", "l.created_at"),
    ("deliver_at", "timestamptz", "l.deliver_at"),
    ("expires_at", "timestamptz", "l.expires_at"),
    // The current time, for events that expire.
    ("looked_at", "timestamptz", "CASE WHEN l.expires_at IS NOT NULL THEN clock_timestamp() END"),
];

/// The values of a template's placeholders, beside the fragments and operators.
pub(super) type Values<'a> = &'a [(&'a str, &'a str)];

/// Parts that several statements share. They may contain other placeholders.
const FRAGMENTS: &[(&str, &str)] = &[
    // The columns of an append, in the order of its parameters.
    ("appended", APPEND_COLUMNS),
    // How `<log>_append` and `<log>_append_many` insert.
    (
        "insert_new",
        "INSERT INTO {log} ({appended})
        VALUES (new_id, new_topic, new_key, new_aggregate, new_version, new_kind, new_source, new_tenant, new_payload, new_bytes, new_content_type,
          new_headers::pg_catalog.jsonb, coalesce(new_occurred_at::pg_catalog.timestamptz, pg_catalog.clock_timestamp()),
          new_deliver_at::pg_catalog.timestamptz, new_expires_at::pg_catalog.timestamptz)",
    ),
    (
        "insert_several",
        "INSERT INTO {log} ({appended})
        SELECT e.id, e.topic, e.key, e.aggregate, e.version, e.kind, e.source, e.tenant, e.payload, e.payload_bytes, e.content_type,
          e.headers::pg_catalog.jsonb, coalesce(e.occurred_at::pg_catalog.timestamptz, pg_catalog.clock_timestamp()),
          e.deliver_at::pg_catalog.timestamptz, e.expires_at::pg_catalog.timestamptz
        FROM unnest(new_ids, new_topics, new_keys, new_aggregates, new_versions, new_kinds, new_sources, new_tenants, new_payloads, new_bytes,
            new_content_types, new_headers, new_occurred_at, new_deliver_at, new_expires_at)
          AS e({appended})",
    ),
    // The end of `enqueue` for an event that has an id. Times are passed as texts that mean the
    // same under every setting.
    (
        "enqueue_own_id",
        "IF enqueue.id IS NOT NULL THEN
      EXECUTE 'SELECT ' {||} {schema_literal} {||} '.' {||} pg_catalog.quote_ident(enqueue.log {||} '_append')
        {||} '(true, $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)'
        INTO known USING event_id, enqueue.topic, enqueue.key, enqueue.aggregate, enqueue.version, enqueue.kind, enqueue.source, enqueue.tenant,
        (CASE WHEN bytes IS NULL THEN enqueue.payload END)::pg_catalog.text, bytes, enqueue.content_type,
        (CASE WHEN enqueue.headers {<>} '{}' THEN enqueue.headers END)::pg_catalog.text,
        pg_catalog.btrim(pg_catalog.to_json(enqueue.occurred_at)::pg_catalog.text, '\"'),
        pg_catalog.btrim(pg_catalog.to_json(enqueue.deliver_at)::pg_catalog.text, '\"'),
        pg_catalog.btrim(pg_catalog.to_json(enqueue.expires_at)::pg_catalog.text, '\"');
      IF known THEN
        RAISE NOTICE 'event % is in the log % already: not appended again', event_id, enqueue.log;
      END IF;
      RETURN event_id;
    END IF;",
    ),
    // True for an event `l` that the subscription $4 may have: one that is limited to a tenant, and
    // always was, gets nothing of others.
    (
        "of_its_tenant",
        "l.tenant IS NOT DISTINCT FROM \
         coalesce((SELECT s.tenant FROM {s}.subscription AS s WHERE s.id = $4 AND NOT s.mixed), l.tenant)",
    ),
    // True for the lane `l` while it is leased under an epoch. In the functions of a lane.
    (
        "held",
        "l.subscription = of_subscription AND l.lane = of_lane AND l.epoch = under_epoch \
         AND l.lease_until > clock_timestamp()",
    ),
    // True for rows `l` that belong to a lane and that its subscription wants. In the functions of
    // a lane.
    (
        "wanted",
        "(lane_count = 1 OR l.slot % lane_count = of_lane) AND {passes}",
    ),
    // True for rows `l` that the filter of a lane accepts. In the functions of a lane.
    (
        "passes",
        "(topic_likes IS NULL OR l.topic LIKE ANY (topic_likes)) AND (of_tenant IS NULL OR l.tenant = of_tenant) \
         AND (of_kinds IS NULL OR coalesce(l.kind, 'domain') = ANY (of_kinds)) \
         AND (of_aggregates IS NULL OR l.aggregate = ANY (of_aggregates)) AND (of_headers IS NULL OR l.headers @> of_headers)",
    ),
    // Only nested loops over indexes, one plan for all parameters, and only Postgres's own names.
    (
        "pinned",
        "SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET jit = off \
         SET max_parallel_workers_per_gather = 0 SET enable_seqscan = off SET enable_bitmapscan = off \
         SET enable_hashjoin = off SET enable_mergejoin = off SET enable_sort = off SET enable_incremental_sort = off \
         SET enable_material = off",
    ),
    // The beginning of a function that receives. Durable even if the role or database says
    // otherwise, because the sender is answered that the message is stored. An assignment rather
    // than PERFORM, which would run a query.
    (
        "bounds",
        "IF current_setting('synchronous_commit') = 'off' THEN
        bound := set_config('synchronous_commit', 'on', true);
      END IF;
      bound := set_config('lock_timeout', '2s', true);",
    ),
    // How many relays in a row have crashed while they held the lane `n`: none if the last one held
    // it for long, which is if it renewed after ten times the length of its lease (`Lease::LONG`).
    (
        "crashes_in_a_row",
        "CASE WHEN n.lease_until > n.granted_at + 11 * n.lease_ttl * interval '1 microsecond' THEN 0 ELSE n.crashes END",
    ),
    // True while the subscription `s` is paused, by the database's clock.
    ("is_paused", "(s.paused_by IS NOT NULL AND coalesce(s.paused_until > clock_timestamp(), true))"),
    // True if the cursor `n` of a lane has not passed the row `l`.
    (
        "is_unread",
        "(NOT pg_visible_in_snapshot(l.xid, n.from_snap) \
         AND (NOT pg_visible_in_snapshot(l.xid, n.to_snap) OR l.seq > n.last_seq))",
    ),
    // The rows of a log that a lane of `n` may not have passed, up to the transaction `{through}`:
    // a snapshot does not see what is at its `xmax` or above, nor the transactions that it lists.
    // Not everything from its `xmin` on, because an idle transaction holds that back for hours.
    // `OFFSET 0` keeps the index `(xid, seq)`.
    (
        "unpassed",
        "(SELECT o.* FROM (
    SELECT min(pg_snapshot_xmax(n.from_snap)) AS low, {through} AS high FROM n
    UNION SELECT late.xid, late.xid FROM n CROSS JOIN LATERAL pg_snapshot_xip(n.from_snap) AS late(xid)
      WHERE late.xid < ALL (SELECT pg_snapshot_xmax(n.from_snap) FROM n)) AS part
  CROSS JOIN LATERAL (SELECT x.* FROM {log} AS x WHERE x.xid >= part.low AND x.xid <= part.high ORDER BY x.xid, x.seq OFFSET 0) AS o)",
    ),
    // The columns of a log that its depth is computed from.
    ("looked_at", "l.seq, l.xid, l.slot, l.topic, l.tenant, l.kind, l.aggregate, l.headers, l.created_at, l.deliver_at"),
    // Blocks of 32 places, one from each equal part of a range. They are spread as evenly as random
    // ones, and they are the same for all subscriptions at the same position, so that their pages
    // are read once. In the function that counts.
    (
        "sample",
        "generate_series(0, blocks - 1) AS block
        CROSS JOIN LATERAL (
          SELECT first_seq + floor((block + block * 0.618034::float8 - floor(block * 0.618034::float8)) * (last_seq - first_seq + 1) / blocks)::bigint AS seq OFFSET 0) AS place
        CROSS JOIN LATERAL (
          SELECT {looked_at} FROM {log} AS l
          WHERE l.seq >= place.seq AND l.seq < place.seq + 32 AND l.seq <= last_seq OFFSET 0) AS l",
    ),
    // Ranges of transaction ids, each without its two ends. Together they are the ids from
    // `xid_low` to before `xid_high`, without the transactions that still run. In the function that
    // counts.
    (
        "between_running",
        "(SELECT edge AS low, lead(edge) OVER (ORDER BY edge) AS high
            FROM (
              SELECT (xid_low::text::numeric - 1)::text::xid8 AS edge
              UNION ALL SELECT running.xid FROM pg_snapshot_xip(pg_current_snapshot()) AS running(xid)
                WHERE running.xid >= xid_low AND running.xid < xid_high
              UNION ALL SELECT xid_high
            ) AS edges)",
    ),
    // True for rows `l` that their lane has not read; the first two also say in which part of the
    // cursor. Every lane has two snapshots. Most rows are on the same side of those of all lanes,
    // which is decided by comparing ids, without a snapshot: this halves the cost. In the function
    // that counts.
    (
        "is_ahead",
        "(l.xid >= all_ahead OR (NOT pg_visible_in_snapshot(l.xid, tos[1 + l.slot % lane_count]) AND NOT pg_visible_in_snapshot(l.xid, froms[1 + l.slot % lane_count]) AND l.xid <> ALL (late)))",
    ),
    (
        "is_left_of_window",
        "(l.seq > settled[1 + l.slot % lane_count] \
         AND ((l.xid >= passed_before AND l.xid < all_opened) OR (NOT pg_visible_in_snapshot(l.xid, froms[1 + l.slot % lane_count]) AND pg_visible_in_snapshot(l.xid, tos[1 + l.slot % lane_count]) AND l.xid <> ALL (late))))",
    ),
    (
        "is_left",
        "(l.xid >= all_ahead OR CASE WHEN l.xid >= passed_before AND l.xid < all_opened THEN l.seq > settled[1 + l.slot % lane_count] \
         ELSE NOT pg_visible_in_snapshot(l.xid, froms[1 + l.slot % lane_count]) AND (NOT pg_visible_in_snapshot(l.xid, tos[1 + l.slot % lane_count]) OR l.seq > settled[1 + l.slot % lane_count]) END)",
    ),
    // True for a delivery row that may be an operator's mark on an event that is not read yet: the
    // index `delivery_mark`.
    ("is_mark", "(d.state {=} 'discarded' OR d.state {=} 'dead' AND d.code {=} 'marked_dead')"),
    // True if row `l` is wanted and has no operator's mark. In the function that counts.
    (
        "is_meant_to_go",
        "{passes} AND NOT (has_marks AND EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = of_subscription AND d.seq = l.seq OFFSET 0))",
    ),
    // True if row `l` was passed by its lane and is `skipped`: see `judged`, `is_taken` and
    // `state`. In the function that counts; the first case is the common one, a subscription that
    // has had only one filter.
    (
        "is_skipped",
        "(l.xid < all_passed OR pg_visible_in_snapshot(l.xid, froms[1 + l.slot % lane_count]) \
         OR (pg_visible_in_snapshot(l.xid, tos[1 + l.slot % lane_count]) AND l.seq <= settled[1 + l.slot % lane_count])) \
         AND (SELECT CASE WHEN by.revision = of_revision THEN ({passes}) IS NOT TRUE
             ELSE NOT EXISTS (SELECT FROM {s}.filter AS s WHERE s.subscription = of_subscription AND s.revision = by.revision AND {is_wanted} OFFSET 0) END
           FROM (SELECT coalesce(CASE WHEN has_passages THEN (SELECT p.revision FROM {s}.passage AS p
               WHERE p.subscription = of_subscription AND p.lane = l.slot % p.lanes AND l.seq <= p.seq_max
                 AND (pg_visible_in_snapshot(l.xid, p.from_snap) OR (pg_visible_in_snapshot(l.xid, p.to_snap) AND l.seq <= p.last_seq))
               ORDER BY p.revision LIMIT 1) END, revisions[1 + l.slot % lane_count]) AS revision OFFSET 0) AS by) \
         AND NOT (has_rows AND EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = of_subscription AND d.seq = l.seq OFFSET 0)) \
         AND NOT (has_sent AND EXISTS (SELECT FROM {s}.sent AS t WHERE t.subscription = of_subscription AND t.seq = l.seq OFFSET 0)) \
         AND NOT (has_unrouted AND EXISTS (SELECT FROM {s}.unrouted AS u WHERE u.log = '{name}' AND u.seq = l.seq OFFSET 0))",
    ),
    // The age of the oldest of the rows `r`, in microseconds.
    (
        "age_of_oldest",
        "(extract(epoch FROM clock_timestamp() - min(r.since) FILTER (WHERE isfinite(r.since))) * 1000000)::bigint",
    ),
    // A pattern for LIKE from one of a subscription's topics.
    (
        "like_of_topic",
        "replace(replace(replace(replace(wanted.topic, chr(92), chr(92) || chr(92)), '%', chr(92) || '%'), '_', chr(92) || '_'), '*', '%')",
    ),
    // True if subscription `s` wants row `l` of its log, for statements about many subscriptions.
    (
        "is_wanted",
        "((s.topics = '{}' OR EXISTS (SELECT FROM unnest(s.topics) AS wanted(topic)
  WHERE l.topic LIKE {like_of_topic}))
  AND (s.tenant IS NULL OR l.tenant = s.tenant)
  AND (s.kinds = '{}' OR coalesce(l.kind, 'domain') = ANY (s.kinds)) AND (s.aggregates = '{}' OR l.aggregate = ANY (s.aggregates))
  AND (s.headers IS NULL OR l.headers @> s.headers))",
    ),
    // True if subscription `s` wants every row of its log.
    (
        "wants_everything",
        "(s.topics = '{}' AND s.tenant IS NULL AND s.kinds = '{}' AND s.aggregates = '{}' AND s.headers IS NULL)",
    ),
    // The revision of the filter with which the subscription of the lane `n` passed the row `l` of
    // its log, or will read it.
    (
        "judged",
        "CASE WHEN {is_unread} THEN (SELECT f.revision FROM {s}.filter AS f WHERE f.subscription = n.subscription ORDER BY f.revision DESC LIMIT 1)
    ELSE coalesce((SELECT p.revision FROM {s}.passage AS p WHERE p.subscription = n.subscription AND p.lane = l.slot % p.lanes AND l.seq <= p.seq_max
      AND (pg_visible_in_snapshot(l.xid, p.from_snap) OR (pg_visible_in_snapshot(l.xid, p.to_snap) AND l.seq <= p.last_seq))
      ORDER BY p.revision LIMIT 1), n.revision) END",
    ),
    // True if a filter of the subscription of the lane `n` accepted or rejected the row `l`, or
    // will. False for rows before the subscription's start.
    (
        "is_judged",
        "EXISTS (SELECT FROM {s}.filter AS by WHERE by.subscription = n.subscription AND by.revision = {judged})",
    ),
    // True if the subscription of the lane `n` skipped row `l`, and it was sent later all the same.
    ("is_sent", "EXISTS (SELECT FROM {s}.sent AS t WHERE t.subscription = n.subscription AND t.seq = l.seq)"),
    // True if row `l` is, or was, delivered to the subscription of the lane `n`.
    (
        "is_taken",
        "EXISTS (SELECT FROM {s}.filter AS s WHERE s.subscription = n.subscription AND s.revision = {judged} AND {is_wanted})",
    ),
    // The time at which the event `l` is to be sent, if it is in the future.
    ("later", "CASE WHEN l.deliver_at > clock_timestamp() AND isfinite(l.deliver_at) THEN l.deliver_at END"),
    // True if subscription `s` takes everything of its log `g` that was not checked for routing
    // yet. None of that may have been passed with a former filter. A lane that has yet to take over
    // this filter has not recorded that in a passage, so it counts as well.
    (
        "takes_all_new",
        "({wants_everything}
    AND NOT EXISTS (SELECT FROM {s}.passage AS p WHERE p.subscription = s.id AND pg_snapshot_xmax(p.to_snap) > g.routed_xid)
    AND NOT EXISTS (SELECT FROM {s}.lane AS b WHERE b.subscription = s.id AND b.revision <> s.revision AND pg_snapshot_xmax(b.to_snap) > g.routed_xid))",
    ),
    // True if a subscription of the log `g` takes everything that was not checked yet.
    ("takes_everything", "EXISTS (SELECT FROM {s}.subscription AS s WHERE s.log = g.name AND {takes_all_new})"),
    // The state of an event `l` with the delivery row `d`, if it has one. `{name}` is its log.
    (
        "state",
        "coalesce(d.state, CASE WHEN {is_sent} THEN 'dispatched' WHEN NOT {is_taken} THEN
      CASE WHEN EXISTS (SELECT FROM {s}.unrouted AS u WHERE u.log = '{name}' AND u.seq = l.seq) THEN 'unrouted' ELSE 'skipped' END
    WHEN {is_unread} THEN 'pending' ELSE 'dispatched' END)",
    ),
    // An event's columns and its state, for a record.
    (
        "record_columns",
        "{columns}, {state}, coalesce(d.attempts, 0), coalesce(d.replays, 0), d.due_at, d.code, d.error, d.updated_at, \
         d.seq, d.key, d.last_attempts::text",
    ),
    // The entries of a settlement that keep or add a row. Waits count from now, by the database's
    // clock.
    (
        "entries",
        "(SELECT u.seq, u.key, u.state, u.halt, u.attempts, u.code, u.error, u.before, u.replays, u.took,
    CASE WHEN u.wait IS NULL THEN u.at ELSE clock_timestamp() + u.wait * interval '1 microsecond' END AS due_at
  FROM unnest($4::bigint[], $5::text[], $6::text[], $7::bool[], $8::int[], $9::text[], $10::text[], $11::bigint[], $12::timestamptz[],
    $13::int[], $14::int[], $15::bigint[]) AS u(seq, key, state, halt, attempts, code, error, wait, at, before, replays, took)) AS e",
    ),
    // The attempt of an entry that had one, in the form that `attempts_from_json` reads.
    (
        "attempt",
        "jsonb_build_array(jsonb_build_object('at', clock_timestamp(), 'code', e.code, 'took_us', e.took, 'answer', left(e.error, 256), 'next_at', e.due_at))",
    ),
    // Where the row of an entry is. Nobody else changes rows of a locked lane, so a `ctid` is valid
    // for the whole statement. `OFFSET 0` and the access by `ctid` alone force this plan, whatever
    // the statistics say. The table is nearly empty most of the time, and then has many rows at
    // once. While it is believed to be empty, reading all rows of a subscription and comparing each
    // with every entry looks cheap (measured with 30,000 rows and 500 entries: seconds).
    (
        "row_of_entry",
        "(SELECT r.ctid AS place FROM {s}.delivery AS r WHERE r.subscription = $1 AND r.seq = e.seq OFFSET 0) AS found",
    ),
    // The same for the rows `$2`.
    (
        "places",
        "ARRAY(SELECT found.place FROM unnest($2::bigint[]) AS e(seq) CROSS JOIN LATERAL {row_of_entry})",
    ),
    // See `DELIVERY_RELEASE` and `CLEAR_FOLLOWER_DUE`. Both are also parts of a function.
    (
        "delivery_release",
        "UPDATE {s}.delivery AS d SET state = 'retrying', due_at = clock_timestamp(), updated_at = clock_timestamp()
WHERE d.ctid = ANY (ARRAY(
  SELECT head.place FROM unnest($2::text[]) AS touched(key)
  CROSS JOIN LATERAL (
    SELECT h.ctid AS place, h.state, h.due_at FROM {s}.delivery AS h
    WHERE h.subscription = $1 AND h.key = touched.key AND h.holds ORDER BY h.seq LIMIT 1 OFFSET 0) AS head
  WHERE head.due_at IS NULL AND head.state IN ('blocked', 'retrying')))",
    ),
    (
        "clear_follower_due",
        "UPDATE {s}.delivery AS d SET due_at = NULL
WHERE d.ctid = ANY (ARRAY(
  SELECT behind.place FROM unnest($2::text[]) AS touched(key)
  CROSS JOIN LATERAL (
    SELECT h.seq FROM {s}.delivery AS h WHERE h.subscription = $1 AND h.key = touched.key AND h.holds ORDER BY h.seq LIMIT 1 OFFSET 0) AS head
  CROSS JOIN LATERAL (
    SELECT b.ctid AS place FROM {s}.delivery AS b WHERE b.subscription = $1 AND b.key = touched.key AND b.holds AND b.seq > head.seq
      AND b.due_at IS NOT NULL ORDER BY b.seq OFFSET 0) AS behind))",
    ),
    // True for a delivery row that still is as it was read: every relevant change raises one of the
    // two numbers or ends the row.
    (
        "is_as_read",
        "d.attempts = e.before AND d.replays = e.replays AND d.state NOT IN ('discarded', 'dead')",
    ),
];

/// `{columns}`: an event's columns from a log called `l`, in the order of [`EVENT_COLUMNS`].
static COLUMNS: LazyLock<String> =
    LazyLock::new(|| EVENT_COLUMNS.map(|(name, _, value)| format!("{value} AS {name}")).join(", "));

/// `{column_types}`: the same columns as a function declares them.
static COLUMN_TYPES: LazyLock<String> =
    LazyLock::new(|| EVENT_COLUMNS.map(|(name, kind, _)| format!("{name} {kind}")).join(", "));

/// Fills a template in one pass. A value that was filled in is not scanned again, because a hostile
/// schema name may contain the text of a placeholder. An unknown name stays as it is.
pub(super) fn fill(sql: &mut String, template: &str, values: Values<'_>) {
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('{') {
        sql.push_str(before);
        rest = match after.split_once('}') {
            Some((name, left)) if place(sql, name, values) => left,
            _ => {
                sql.push('{');
                after
            }
        };
    }
    sql.push_str(rest);
}

/// Appends what a name stands for to the statement; `false` if it stands for nothing.
fn place(sql: &mut String, name: &str, values: Values<'_>) -> bool {
    let value = values.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
    let is_operator = || !name.is_empty() && name.bytes().all(|byte| b"+-*/<>=~!%&|".contains(&byte));
    if let Some(value) = value {
        sql.push_str(value);
    } else if is_operator() {
        sql.extend(["OPERATOR(pg_catalog.", name, ")"]);
    } else if let Some((_, fragment)) = FRAGMENTS.iter().find(|(known, _)| *known == name) {
        fill(sql, fragment, values);
    } else if name == "columns" {
        sql.push_str(&COLUMNS);
    } else if name == "column_types" {
        sql.push_str(&COLUMN_TYPES);
    } else {
        return false;
    }
    true
}
