-- How drivers append: any number of events in the caller's transaction, in one call.
--
-- In the database for the same reason as the window: of an event alone, three quarters of the
-- server's time went into planning an INSERT that is always the same. A function keeps its plan,
-- also behind a pooler. It has no SET, which would cost a fifth more, and so names everything in
-- full.

-- Makes the functions of a log that append: `<log>_append` takes an event, `<log>_append_many`
-- several, which take their `seq` in the order of the arrays. Idempotent. They run with the rights
-- of whoever calls them. Times are text, because not every driver speaks our time library.
CREATE FUNCTION {s}.create_append(log_name text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS ${tag}$
BEGIN
  EXECUTE replace(${tag}_ddl$
    CREATE OR REPLACE FUNCTION {s}.{tag}_log_append(
      new_id uuid, new_topic text, new_key text, new_aggregate text, new_version bigint, new_kind text, new_source text, new_tenant text,
      new_payload text, new_bytes bytea, new_content_type text, new_headers text, new_occurred_at text, new_deliver_at text,
      new_expires_at text)
    RETURNS void LANGUAGE plpgsql VOLATILE AS ${tag}_body$
    BEGIN
      INSERT INTO {s}."{tag}_log" ({appended})
        VALUES (new_id, new_topic, new_key, new_aggregate, new_version, new_kind, new_source, new_tenant, new_payload, new_bytes, new_content_type,
          new_headers::pg_catalog.jsonb, coalesce(new_occurred_at::pg_catalog.timestamptz, pg_catalog.clock_timestamp()),
          new_deliver_at::pg_catalog.timestamptz, new_expires_at::pg_catalog.timestamptz);
    END
    ${tag}_body$;

    CREATE OR REPLACE FUNCTION {s}.{tag}_log_append_many(
      new_ids uuid[], new_topics text[], new_keys text[], new_aggregates text[], new_versions bigint[], new_kinds text[],
      new_sources text[], new_tenants text[], new_payloads text[], new_bytes bytea[], new_content_types text[], new_headers text[],
      new_occurred_at text[], new_deliver_at text[], new_expires_at text[])
    RETURNS void LANGUAGE plpgsql VOLATILE AS ${tag}_body$
    BEGIN
      INSERT INTO {s}."{tag}_log" ({appended})
        SELECT e.id, e.topic, e.key, e.aggregate, e.version, e.kind, e.source, e.tenant, e.payload, e.payload_bytes, e.content_type,
          e.headers::pg_catalog.jsonb, coalesce(e.occurred_at::pg_catalog.timestamptz, pg_catalog.clock_timestamp()),
          e.deliver_at::pg_catalog.timestamptz, e.expires_at::pg_catalog.timestamptz
        FROM unnest(new_ids, new_topics, new_keys, new_aggregates, new_versions, new_kinds, new_sources, new_tenants, new_payloads, new_bytes,
            new_content_types, new_headers, new_occurred_at, new_deliver_at, new_expires_at)
          AS e({appended});
    END
    ${tag}_body$
  ${tag}_ddl$, '{tag}_log', log_name);
END
${tag}$;
