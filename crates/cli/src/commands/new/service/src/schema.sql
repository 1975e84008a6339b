-- Runs at every start. Replicas that start at the same time wait for each other here.
SELECT pg_advisory_xact_lock(hashtextextended('shop-service', 0));

CREATE TABLE IF NOT EXISTS orders (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  mail text NOT NULL
);
