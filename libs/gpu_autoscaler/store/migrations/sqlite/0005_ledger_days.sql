-- Old spans: one row an instance and UTC day, with the shares of its users. `number` is that of its last span.
CREATE TABLE ledger_days (
    provider_id TEXT NOT NULL,
    day TEXT NOT NULL,
    number INTEGER NOT NULL UNIQUE,
    fact TEXT NOT NULL,
    PRIMARY KEY (provider_id, day)
);

CREATE INDEX ledger_days_by_day ON ledger_days (day);

-- Open: the instance has not ended, as far as is known. Only these are read at a start.
ALTER TABLE charged_instances ADD COLUMN is_open INTEGER NOT NULL DEFAULT 1;

-- Spans that begin earlier are rolled up: a repeat is charged no second time.
ALTER TABLE charged_instances ADD COLUMN rolled_until INTEGER;

CREATE INDEX charged_instances_open ON charged_instances (provider_id) WHERE is_open = 1;

-- A deleted span is looked up here: the last one of an instance is kept.
CREATE INDEX charged_instances_last ON charged_instances (last_number);

UPDATE charged_instances SET is_open = 0 WHERE last_number IN (
    SELECT number FROM ledger WHERE to_at < (SELECT max(to_at) FROM ledger) - 604800000000
);
