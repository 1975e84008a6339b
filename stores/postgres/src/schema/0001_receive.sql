-- How messages from outside are stored once: their receipts and their events, or what is known of them, in one call.
--
-- In the database for the same reason as the window: of a webhook's way, most was planning statements that are always the same. A function
-- keeps its plans, also behind a pooler. Of many, because those that arrive together share one commit.

-- Makes the function `<log>_receive` of a log. Idempotent.
--
-- One message per place of the arrays; `by_identity` are the places in the order of (source, tenant, message): rows are locked in this
-- order, so that two calls with the same messages do not lock each other out. The answer has a place for each:
--   an id      the message is remembered and its event stored under this id
--   duplicate  it is known, with the same digest (or was only asked for, and has none)
--   conflict   its id is known with another digest; that is noted, and nothing stored
--
-- It is meant to be a transaction of its own, of one statement: nothing can be left open then, and only waits for locks need a bound.
-- Somebody who holds a message's receipt for longer keeps out that message, not those it came with: the caller then tries each alone.
CREATE FUNCTION {s}.create_receive(log_name text) RETURNS void LANGUAGE plpgsql AS ${tag}$
BEGIN
  EXECUTE replace(replace(${tag}_ddl$
    CREATE OR REPLACE FUNCTION <schema>.<log>_receive(
      by_identity int[], of_sources text[], of_messages text[], with_digests bytea[],
      new_ids uuid[], new_topics text[], new_keys text[], new_aggregates text[], new_versions bigint[], new_kinds text[],
      new_sources text[], new_tenants text[], new_payloads text[], new_bytes bytea[], new_content_types text[], new_headers text[],
      new_occurred_at text[], new_deliver_at text[])
    RETURNS text[] LANGUAGE plpgsql VOLATILE AS ${tag}_body$
    DECLARE
      verdicts text[] := array_fill(NULL::text, ARRAY[cardinality(by_identity)]);
      events uuid[] := array_fill(NULL::uuid, ARRAY[cardinality(by_identity)]);
      at int;
      fresh boolean := false;
      known bytea;
    BEGIN
      -- Durable even where the role or database says otherwise: the sender is told that the message is ours.
      IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
      END IF;
      PERFORM set_config('lock_timeout', '2s', true);
      FOREACH at IN ARRAY by_identity LOOP
        -- A second receiver of the id waits here for the first.
        INSERT INTO <schema>.receipt (source, tenant, message_id, digest)
          VALUES (of_sources[at], coalesce(new_tenants[at], ''), of_messages[at], with_digests[at]) ON CONFLICT DO NOTHING;
        IF FOUND THEN
          events[at] := coalesce(new_ids[at], <schema>.uuid_v7());
          verdicts[at] := events[at];
          fresh := true;
          CONTINUE;
        END IF;
        SELECT r.digest INTO known FROM <schema>.receipt AS r
          WHERE r.source = of_sources[at] AND r.tenant = coalesce(new_tenants[at], '') AND r.message_id = of_messages[at];
        IF NOT FOUND THEN
          RAISE EXCEPTION 'the record of a message was forgotten while it was looked at; send it again' USING ERRCODE = 'serialization_failure';
        ELSIF known IS NULL OR known = with_digests[at] THEN
          verdicts[at] := 'duplicate';
        ELSE
          -- Two bodies of one message may come in either order: whoever notes conflicts of it has its receipt.
          PERFORM FROM <schema>.receipt AS r
            WHERE r.source = of_sources[at] AND r.tenant = coalesce(new_tenants[at], '') AND r.message_id = of_messages[at] FOR NO KEY UPDATE;
          -- The same body again only raises the count: a sender who repeats himself does not fill the disk.
          INSERT INTO <schema>.conflict AS c (source, tenant, message_id, digest_stored, digest_refused)
            VALUES (of_sources[at], coalesce(new_tenants[at], ''), of_messages[at], known, with_digests[at])
            ON CONFLICT (source, tenant, message_id, digest_refused) DO UPDATE SET times = c.times + 1, last_at = clock_timestamp();
          verdicts[at] := 'conflict';
        END IF;
      END LOOP;
      IF fresh THEN
        -- In the order given: it is the order of `seq`. Not at all for repetitions: an INSERT of nothing would still wake relays by its trigger.
        INSERT INTO <schema>.<log> (id, topic, key, aggregate, version, kind, source, tenant, payload, payload_bytes, content_type, headers,
            occurred_at, deliver_at)
          SELECT e.id, e.topic, e.key, e.aggregate, e.version, e.kind, e.source, e.tenant, e.payload, e.payload_bytes, e.content_type,
            e.headers::jsonb, coalesce(e.occurred_at::timestamptz, clock_timestamp()), e.deliver_at::timestamptz
          FROM unnest(events, new_topics, new_keys, new_aggregates, new_versions, new_kinds, new_sources, new_tenants, new_payloads, new_bytes,
              new_content_types, new_headers, new_occurred_at, new_deliver_at)
            AS e(id, topic, key, aggregate, version, kind, source, tenant, payload, payload_bytes, content_type, headers, occurred_at, deliver_at)
          WHERE e.id IS NOT NULL;
      END IF;
      RETURN verdicts;
    END
    ${tag}_body$
  ${tag}_ddl$, '<log>', log_name), '<schema>', {schema_literal});
END
${tag}$;
