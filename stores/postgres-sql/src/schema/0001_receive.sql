-- How messages from outside are stored once: receipts and events, or what is known of the messages,
-- in one call.
--
-- It runs in the database for the same reason as the window: most of a webhook's time was spent
-- planning the same statements again and again. A function keeps its plans, even behind a pooler.
-- One call takes several messages, because those that arrive together share one commit.

-- Classifies a message whose id is known already, in the words of `Received`:
--   duplicate  known with the same digest
--   conflict   known with another digest; the conflict is recorded
CREATE FUNCTION {s}.recognise(of_source text, of_tenant text, of_message text, with_digest bytea) RETURNS text LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp AS ${tag}$
DECLARE
  known bytea;
BEGIN
  SELECT r.digest INTO known FROM {s}.receipt AS r
    WHERE r.source = of_source AND r.tenant = coalesce(of_tenant, '') AND r.message_id = of_message;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'the record of a message was forgotten while it was looked at; send it again' USING ERRCODE = 'serialization_failure';
  ELSIF known = with_digest THEN
    RETURN 'duplicate';
  END IF;
  -- Lock the receipt first, so that concurrent conflicts of one message are recorded one after
  -- another: its bodies may arrive in any order.
  PERFORM FROM {s}.receipt AS r
    WHERE r.source = of_source AND r.tenant = coalesce(of_tenant, '') AND r.message_id = of_message FOR NO KEY UPDATE;
  -- The same body again only raises the count, so that a sender who repeats it does not fill the
  -- disk.
  INSERT INTO {s}.conflict AS c (source, tenant, message_id, digest_stored, digest_refused)
    VALUES (of_source, coalesce(of_tenant, ''), of_message, known, with_digest)
    ON CONFLICT (source, tenant, message_id, digest_refused) DO UPDATE SET times = c.times + 1, last_at = clock_timestamp();
  RETURN 'conflict';
END
${tag}$;

-- Creates the functions of a log that receive: `<log>_receive` takes one message,
-- `<log>_receive_many` several. Idempotent.
--
-- The answer for each message is `accepted` (its receipt and event were stored), or the result of
-- `recognise`.
--
-- Each call is meant to be its own transaction of one statement. Then nothing can be left open, and
-- only waits for locks need a limit. If someone holds the receipt of a message for longer, only
-- that message fails, not those it came with: the caller then tries each alone.
--
-- A single message, the usual case, has its own function: without arrays and a scan over them it
-- costs a fifth less.
CREATE FUNCTION {s}.create_receive(log_name text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  EXECUTE replace(${tag}_ddl$
    CREATE OR REPLACE FUNCTION {s}.{tag}_log_receive(
      of_source text, of_message text, with_digest bytea,
      new_id uuid, new_topic text, new_key text, new_aggregate text, new_version bigint, new_kind text, new_source text, new_tenant text,
      new_payload text, new_bytes bytea, new_content_type text, new_headers text, new_occurred_at text, new_deliver_at text,
      new_expires_at text)
    RETURNS text LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS ${tag}_body$
    DECLARE
      bound text;
    BEGIN
      {bounds}
      -- A second receiver of the id waits here for the first.
      INSERT INTO {s}.receipt (source, tenant, message_id, digest)
        VALUES (of_source, coalesce(new_tenant, ''), of_message, with_digest) ON CONFLICT DO NOTHING;
      IF NOT FOUND THEN
        RETURN {s}.recognise(of_source, new_tenant, of_message, with_digest);
      END IF;
      INSERT INTO {s}."{tag}_log" ({appended})
        VALUES (new_id, new_topic, new_key, new_aggregate, new_version, new_kind, new_source, new_tenant, new_payload, new_bytes, new_content_type,
          new_headers::jsonb, coalesce(new_occurred_at::timestamptz, clock_timestamp()), new_deliver_at::timestamptz,
          new_expires_at::timestamptz);
      RETURN 'accepted';
    END
    ${tag}_body$;

    -- One message per array element. `ranks` is the order by (source, tenant, message). Rows are
    -- locked in this order, so that two calls with the same messages do not deadlock. `repeats`
    -- marks messages whose identity occurs earlier in the arrays.
    CREATE OR REPLACE FUNCTION {s}.{tag}_log_receive_many(
      ranks int[], repeats boolean[], of_sources text[], of_messages text[], with_digests bytea[],
      new_ids uuid[], new_topics text[], new_keys text[], new_aggregates text[], new_versions bigint[], new_kinds text[],
      new_sources text[], new_tenants text[], new_payloads text[], new_bytes bytea[], new_content_types text[], new_headers text[],
      new_occurred_at text[], new_deliver_at text[], new_expires_at text[])
    RETURNS text[] LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS ${tag}_body$
    DECLARE
      verdicts text[];
      stored_sources text[];
      stored_tenants text[];
      stored_messages text[];
      known record;
      bound text;
    BEGIN
      {bounds}
      -- One statement for all: one per message cost a tenth to a fifth more of the whole call. A
      -- second receiver of an id waits here for the first.
      WITH stored AS (
        INSERT INTO {s}.receipt (source, tenant, message_id, digest)
        SELECT g.source, coalesce(g.tenant, ''), g.message_id, g.digest
        FROM unnest(of_sources, new_tenants, of_messages, with_digests, ranks, repeats) AS g(source, tenant, message_id, digest, rank, repeated)
        WHERE NOT g.repeated ORDER BY g.rank
        ON CONFLICT DO NOTHING RETURNING source, tenant, message_id)
      SELECT array_agg(stored.source), array_agg(stored.tenant), array_agg(stored.message_id)
        INTO stored_sources, stored_tenants, stored_messages FROM stored;
      IF cardinality(stored_messages) = cardinality(of_messages) THEN
        -- The usual case: all are new, so nobody has to find out which.
        verdicts := array_fill('accepted'::text, ARRAY[cardinality(of_messages)]);
      ELSE
        SELECT array_agg(CASE WHEN stored.source IS NOT NULL THEN 'accepted' END ORDER BY given.place) INTO verdicts
        FROM unnest(of_sources, new_tenants, of_messages, repeats) WITH ORDINALITY AS given(source, tenant, message_id, repeated, place)
        LEFT JOIN unnest(stored_sources, stored_tenants, stored_messages) AS stored(source, tenant, message_id) ON NOT given.repeated
          AND (stored.source, stored.tenant, stored.message_id) = (given.source, coalesce(given.tenant, ''), given.message_id);
        FOR known IN
          SELECT g.source, g.tenant, g.message_id, g.digest, g.place
          FROM unnest(of_sources, new_tenants, of_messages, with_digests, ranks, verdicts)
            WITH ORDINALITY AS g(source, tenant, message_id, digest, rank, verdict, place)
          WHERE g.verdict IS NULL ORDER BY g.rank
        LOOP
          verdicts[known.place] := {s}.recognise(known.source, known.tenant, known.message_id, known.digest);
        END LOOP;
      END IF;
      IF 'accepted' = ANY (verdicts) THEN
        -- In the given order, which becomes the order of `seq`. Skipped if all are repeats: an
        -- INSERT of no rows would still wake relays by its trigger.
        INSERT INTO {s}."{tag}_log" ({appended})
          SELECT e.id, e.topic, e.key, e.aggregate, e.version, e.kind, e.source, e.tenant, e.payload, e.payload_bytes, e.content_type,
            e.headers::jsonb, coalesce(e.occurred_at::timestamptz, clock_timestamp()), e.deliver_at::timestamptz, e.expires_at::timestamptz
          FROM unnest(verdicts, new_ids, new_topics, new_keys, new_aggregates, new_versions, new_kinds, new_sources, new_tenants, new_payloads, new_bytes,
              new_content_types, new_headers, new_occurred_at, new_deliver_at, new_expires_at)
            AS e(verdict, {appended})
          WHERE e.verdict = 'accepted';
      END IF;
      RETURN verdicts;
    END
    ${tag}_body$
  ${tag}_ddl$, '{tag}_log', log_name);
END
${tag}$;
