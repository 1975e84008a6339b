-- How a message from outside is stored once: its receipt and its event, or what is known of it, in one call.
--
-- In the database for the same reason as the window: of a webhook's way, most was planning statements that are always the same. A function
-- keeps its plans, also behind a pooler.

-- Makes the function `<log>_receive` of a log. Idempotent.
--
-- The answer is one row. `verdict`:
--   accepted   the message is remembered and its event stored; `event` is its id
--   duplicate  it is known, with the same digest (or was only asked for, and has none)
--   conflict   its id is known with another digest; that is noted, and nothing stored
--   forgotten  its record went away while it was looked at: the sender may come again
CREATE FUNCTION {s}.create_receive(log_name text) RETURNS void LANGUAGE plpgsql AS ${tag}$
BEGIN
  EXECUTE replace(replace(${tag}_ddl$
    CREATE OR REPLACE FUNCTION <schema>.<log>_receive(
      of_source text, of_tenant text, of_message text, with_digest bytea,
      new_id uuid, new_topic text, new_key text, new_aggregate text, new_version bigint, new_kind text, new_source text,
      new_payload text, new_bytes bytea, new_content_type text, new_headers text, new_occurred_at text, new_deliver_at text,
      OUT verdict text, OUT event uuid)
    LANGUAGE plpgsql VOLATILE AS ${tag}_body$
    DECLARE
      known bytea;
    BEGIN
      -- Durable even where the role or database says otherwise: the sender is told that the message is ours.
      IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
      END IF;
      -- A second receiver of the id waits here for the first.
      INSERT INTO <schema>.receipt (source, tenant, message_id, digest)
        VALUES (of_source, coalesce(of_tenant, ''), of_message, with_digest) ON CONFLICT DO NOTHING;
      IF FOUND THEN
        INSERT INTO <schema>.<log> (id, topic, key, aggregate, version, kind, source, tenant, payload, payload_bytes, content_type, headers,
            occurred_at, deliver_at)
          VALUES (coalesce(new_id, <schema>.uuid_v7()), new_topic, new_key, new_aggregate, new_version, new_kind, new_source, of_tenant,
            new_payload, new_bytes, new_content_type, new_headers::jsonb, coalesce(new_occurred_at::timestamptz, clock_timestamp()),
            new_deliver_at::timestamptz)
          RETURNING id INTO event;
        verdict := 'accepted';
        RETURN;
      END IF;
      SELECT r.digest INTO known FROM <schema>.receipt AS r
        WHERE r.source = of_source AND r.tenant = coalesce(of_tenant, '') AND r.message_id = of_message;
      IF NOT FOUND THEN
        verdict := 'forgotten';
      ELSIF known IS NULL OR known = with_digest THEN
        verdict := 'duplicate';
      ELSE
        -- The same body again only raises the count: a sender who repeats himself does not fill the disk.
        INSERT INTO <schema>.conflict AS c (source, tenant, message_id, digest_stored, digest_refused)
          VALUES (of_source, coalesce(of_tenant, ''), of_message, known, with_digest)
          ON CONFLICT (source, tenant, message_id, digest_refused) DO UPDATE SET times = c.times + 1, last_at = clock_timestamp();
        verdict := 'conflict';
      END IF;
    END
    ${tag}_body$
  ${tag}_ddl$, '<log>', log_name), '<schema>', {schema_literal});
END
${tag}$;
