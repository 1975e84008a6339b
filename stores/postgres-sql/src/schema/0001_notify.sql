-- Writers wake relays that sleep, if asked to.

-- Runs after every INSERT statement on a log whose writers notify. It runs with its owner's rights,
-- so that writers need no right to read `sleeper`. No relay declares more than a second: what ends
-- later than in ten seconds was declared before the clock was set back.
--
-- Commits with a NOTIFY wait for each other, the disk included: of 32 writers' 2,300 commits a
-- second, 640 were left (measured). So it notifies only if a relay sleeps, and of the transactions
-- that are open at once at most four do: each holds a lock. The relay that one of them wakes reads
-- again within milliseconds, and finds what the others have committed by then. What they commit
-- later, or if that one rolls back, waits for the next poll. Four locks, of which each writer tries
-- two, because a transaction that holds one may stay open for long.
CREATE FUNCTION {s}.notify_sleepers() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS ${tag}$
BEGIN
  IF EXISTS (SELECT FROM {s}.sleeper WHERE log = TG_TABLE_NAME AND asleep_until > clock_timestamp() AND asleep_until < clock_timestamp() + interval '10 seconds') THEN
    IF pg_try_advisory_xact_lock(hashtextextended('postbox notify ' || TG_RELID, pg_backend_pid() % 4))
       OR pg_try_advisory_xact_lock(hashtextextended('postbox notify ' || TG_RELID, (pg_backend_pid() + 1) % 4)) THEN
      PERFORM pg_notify('postbox_' || TG_RELID, '');
    END IF;
  END IF;
  RETURN NULL;
END
${tag}$;
REVOKE ALL ON FUNCTION {s}.notify_sleepers() FROM PUBLIC;

-- Makes the writers of a log notify sleeping relays, or stops it. Idempotent. Both return the
-- channel.
CREATE FUNCTION {s}.notify_enable(log_name text) RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS ${tag}$
DECLARE
  log_table regclass := ({schema_literal} || '.' || quote_ident(log_name))::regclass;
BEGIN
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_trigger WHERE tgrelid = log_table AND tgname = 'postbox_notify') THEN
    EXECUTE 'CREATE OR REPLACE TRIGGER postbox_notify AFTER INSERT ON ' || log_table
      || ' FOR EACH STATEMENT EXECUTE FUNCTION ' || {schema_literal} || '.notify_sleepers()';
  END IF;
  RETURN 'postbox_' || log_table::oid;
END
${tag}$;

CREATE FUNCTION {s}.notify_disable(log_name text) RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS ${tag}$
DECLARE
  log_table regclass := ({schema_literal} || '.' || quote_ident(log_name))::regclass;
BEGIN
  EXECUTE 'DROP TRIGGER IF EXISTS postbox_notify ON ' || log_table;
  RETURN 'postbox_' || log_table::oid;
END
${tag}$;
