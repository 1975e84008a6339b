-- How drivers append: any number of events in the caller's transaction, in one call.
--
-- In the database for the same reason as the window: of an event alone, three quarters of the
-- server's time went into planning an INSERT that is always the same. A function keeps its plan,
-- also behind a pooler. It has no SET, which would cost a fifth more, and so names everything in
-- full.

-- Makes the functions of a log that append: `<log>_append` takes an event, `<log>_append_many`
-- several, which take their `seq` in the order of the arrays. Idempotent. They run with the rights
-- of whoever calls them. Times are text, because not every driver speaks our time library.
--
-- The answer is whether the log had this very event, or how many of them. Only where a caller
-- brings ids of its own (`may_be_known`): to insert what may be there costs more. Without a
-- conflict target and RETURNING, which need the right to read. What was left out and is not known
-- is tried again: retention may have deleted it between the two, and another producer may have
-- appended it since. At last it is inserted without a condition, for Postgres to say what is in its
-- way; where that is the id, an event alone says what to do.
CREATE FUNCTION {s}.create_append(log_name text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  EXECUTE replace(${tag}_ddl$
    -- Whether the log has this very event; for those who append and may not read. It looks with the
    -- owner's rights, which policies bind too, and so as the tenant of the event: whoever works for
    -- another one could not have inserted it. A payload is its bytes, given as text or as bytea.
    CREATE OR REPLACE FUNCTION {s}.{tag}_log_has(
      event_id uuid, of_topic text, of_key text, of_tenant text, of_payload text, of_bytes bytea)
    RETURNS boolean LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS ${tag}_body$
    DECLARE
      named text := coalesce(current_setting('postbox.tenant', true), '');
      is_known boolean;
    BEGIN
      PERFORM set_config('postbox.tenant', coalesce(of_tenant, ''), true);
      is_known := EXISTS (SELECT FROM {s}."{tag}_log" AS l WHERE l.id = event_id AND l.topic = of_topic AND l.key IS NOT DISTINCT FROM of_key
        AND l.tenant IS NOT DISTINCT FROM of_tenant
        AND coalesce(l.payload_bytes, convert_to(l.payload, 'UTF8')) = coalesce(of_bytes, convert_to(of_payload, 'UTF8')));
      PERFORM set_config('postbox.tenant', named, true);
      RETURN is_known;
    END
    ${tag}_body$;
    REVOKE ALL ON FUNCTION {s}.{tag}_log_has FROM PUBLIC;

    CREATE OR REPLACE FUNCTION {s}.{tag}_log_append(
      may_be_known boolean,
      new_id uuid, new_topic text, new_key text, new_aggregate text, new_version bigint, new_kind text, new_source text, new_tenant text,
      new_payload text, new_bytes bytea, new_content_type text, new_headers text, new_occurred_at text, new_deliver_at text,
      new_expires_at text)
    RETURNS boolean LANGUAGE plpgsql VOLATILE AS ${tag}_body$
    DECLARE
      broken pg_catalog.text;
    BEGIN
      IF may_be_known THEN
        FOR try IN 1..3 LOOP
          {insert_new} ON CONFLICT DO NOTHING;
          IF FOUND THEN
            RETURN false;
          ELSIF {s}.{tag}_log_has(new_id, new_topic, new_key, new_tenant, new_payload, new_bytes) THEN
            RETURN true;
          END IF;
        END LOOP;
        BEGIN
          {insert_new};
          RETURN false;
        EXCEPTION WHEN unique_violation THEN
          GET STACKED DIAGNOSTICS broken = CONSTRAINT_NAME;
          IF broken {<>} '{tag}_log_id_key' THEN
            RAISE;
          END IF;
          RAISE EXCEPTION 'the log {tag}_log has another event under the id %', new_id USING ERRCODE = 'unique_violation', CONSTRAINT = broken,
            HINT = 'the same event has the same topic, key, tenant and payload; give a different event its own id';
        END;
      END IF;
      {insert_new};
      RETURN false;
    END
    ${tag}_body$;

    CREATE OR REPLACE FUNCTION {s}.{tag}_log_append_many(
      may_be_known boolean,
      new_ids uuid[], new_topics text[], new_keys text[], new_aggregates text[], new_versions bigint[], new_kinds text[],
      new_sources text[], new_tenants text[], new_payloads text[], new_bytes bytea[], new_content_types text[], new_headers text[],
      new_occurred_at text[], new_deliver_at text[], new_expires_at text[])
    RETURNS int LANGUAGE plpgsql VOLATILE AS ${tag}_body$
    DECLARE
      given pg_catalog.int4 := pg_catalog.cardinality(new_ids);
      appended pg_catalog.int4;
      others pg_catalog.int4;
      tries pg_catalog.int4 := 0;
    BEGIN
      IF may_be_known THEN
        {insert_several} ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS appended = ROW_COUNT;
        WHILE appended {<} given AND EXISTS (
          SELECT FROM unnest(new_ids, new_topics, new_keys, new_tenants, new_payloads, new_bytes) AS e(id, topic, key, tenant, payload, payload_bytes)
          WHERE NOT {s}.{tag}_log_has(e.id, e.topic, e.key, e.tenant, e.payload, e.payload_bytes))
        LOOP
          IF tries {<} 3 THEN
            {insert_several}
              WHERE NOT {s}.{tag}_log_has(e.id, e.topic, e.key, e.tenant, e.payload, e.payload_bytes) ON CONFLICT DO NOTHING;
          ELSE
            {insert_several}
              WHERE NOT {s}.{tag}_log_has(e.id, e.topic, e.key, e.tenant, e.payload, e.payload_bytes);
          END IF;
          GET DIAGNOSTICS others = ROW_COUNT;
          appended := appended {+} others;
          -- What even then is not there was left out by a trigger or a rule of the owner's.
          EXIT WHEN tries {=} 3;
          tries := tries {+} 1;
        END LOOP;
        RETURN given {-} appended;
      END IF;
      {insert_several};
      RETURN 0;
    END
    ${tag}_body$
  ${tag}_ddl$, '{tag}_log', log_name);
END
${tag}$;
