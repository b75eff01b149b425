-- Old spans: one row an instance and UTC day, with the shares of its users. `number` is that of its last span.
CREATE TABLE ledger_days (
    provider_id TEXT NOT NULL,
    day TEXT COLLATE "C" NOT NULL,
    number BIGINT NOT NULL UNIQUE,
    fact TEXT NOT NULL,
    PRIMARY KEY (provider_id, day)
);

CREATE INDEX ledger_days_by_day ON ledger_days (day);

-- Open: the instance has not ended, as far as is known. Only these are read at a start.
ALTER TABLE charged_instances ADD COLUMN is_open SMALLINT NOT NULL DEFAULT 1;

-- Spans that begin earlier are rolled up: a repeat is charged no second time.
ALTER TABLE charged_instances ADD COLUMN rolled_until BIGINT;

CREATE INDEX charged_instances_open ON charged_instances (provider_id) WHERE is_open = 1;
CREATE INDEX charged_instances_last ON charged_instances (last_number);

UPDATE charged_instances SET is_open = 0 WHERE last_number IN (
    SELECT number FROM ledger WHERE to_at < (SELECT max(to_at) FROM ledger) - 604800000000
);

-- The ledger by UTC day. A partition ends with the day of its name; the first one has everything before. What belongs
-- to no partition is in the default one. No key of a partitioned table is without its time, so none is referenced.
ALTER TABLE charged_instances DROP CONSTRAINT charged_instances_last_number_fkey;
ALTER TABLE ledger RENAME TO ledger_before;
ALTER TABLE ledger_before ALTER COLUMN number DROP IDENTITY;
ALTER TABLE ledger_before DROP CONSTRAINT ledger_pkey;
ALTER TABLE ledger_before RENAME CONSTRAINT ledger_provider_id_from_at_key TO ledger_before_provider_id_from_at_key;
ALTER INDEX ledger_unconfirmed RENAME TO ledger_before_unconfirmed;
CREATE SEQUENCE ledger_numbers;
SELECT setval('ledger_numbers', coalesce(max(number), 0) + 1, false) FROM ledger_before;

CREATE TABLE ledger (
    number BIGINT NOT NULL DEFAULT nextval('ledger_numbers'),
    provider_id TEXT NOT NULL,
    from_at BIGINT NOT NULL,
    to_at BIGINT NOT NULL,
    total_micro_usd BIGINT NOT NULL,
    idle_micro_usd BIGINT NOT NULL,
    fact TEXT NOT NULL,
    is_confirmed SMALLINT NOT NULL DEFAULT 0,
    PRIMARY KEY (number, from_at),
    UNIQUE (provider_id, from_at)
) PARTITION BY RANGE (from_at);

CREATE INDEX ledger_unconfirmed ON ledger (number) WHERE is_confirmed = 0;
CREATE TABLE ledger_rest PARTITION OF ledger DEFAULT;

DO $$
DECLARE
    ends_at TIMESTAMP := date_trunc('day', greatest(
        now() AT TIME ZONE 'UTC',
        (SELECT to_timestamp(max(from_at) / 1000000.0) AT TIME ZONE 'UTC' FROM ledger_before)
    )) + INTERVAL '1 day';
    name TEXT := 'ledger_' || to_char(ends_at - INTERVAL '1 day', 'YYYYMMDD');
BEGIN
    EXECUTE format('ALTER TABLE ledger_before RENAME TO %I', name);
    EXECUTE format(
        'ALTER TABLE ledger ATTACH PARTITION %I FOR VALUES FROM (MINVALUE) TO (%s)',
        name, (extract(epoch FROM ends_at) * 1000000)::BIGINT
    );
END
$$;
