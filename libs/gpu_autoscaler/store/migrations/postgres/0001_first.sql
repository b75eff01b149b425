-- The same tables as in SQLite: instants are microseconds since 1970 UTC, documents are published JSON (as text, to be
-- returned byte for byte). `number` is the order of arrival, and the cursor.

CREATE TABLE jobs (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id TEXT NOT NULL UNIQUE,
    project_id TEXT NOT NULL,
    request_digest TEXT NOT NULL,
    spec TEXT NOT NULL,
    accepted_at BIGINT NOT NULL,
    outcome TEXT,
    finished_at BIGINT
);

CREATE INDEX jobs_by_project ON jobs (project_id, number);
CREATE INDEX jobs_unfinished ON jobs (number) WHERE outcome IS NULL;

CREATE TABLE plans (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    plan_id TEXT NOT NULL UNIQUE,
    made_at BIGINT NOT NULL,
    fact TEXT NOT NULL
);

-- An instance's time is charged once: spans of an instance follow each other without a gap.
CREATE TABLE ledger (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    provider_id TEXT NOT NULL,
    from_at BIGINT NOT NULL,
    to_at BIGINT NOT NULL,
    total_micro_usd BIGINT NOT NULL,
    idle_micro_usd BIGINT NOT NULL,
    fact TEXT NOT NULL,
    is_confirmed SMALLINT NOT NULL DEFAULT 0,
    UNIQUE (provider_id, from_at)
);

-- Spans not yet confirmed to be on the stream.
CREATE INDEX ledger_unconfirmed ON ledger (number) WHERE is_confirmed = 0;

-- Sums of the ledger, updated in the same transaction, so that a start does not read years of it.
CREATE TABLE charged_instances (
    provider_id TEXT PRIMARY KEY,
    from_at BIGINT NOT NULL,
    last_number BIGINT NOT NULL REFERENCES ledger (number),
    total_micro_usd BIGINT NOT NULL
);

CREATE TABLE charged_jobs (
    job_id TEXT PRIMARY KEY,
    allocated_micro_usd BIGINT NOT NULL
);

-- Collation C: names of days and months are compared and sorted by their characters, whatever the server's locale.
CREATE TABLE charged_periods (
    period TEXT COLLATE "C" NOT NULL,
    owner TEXT COLLATE "C" NOT NULL,
    micro_usd BIGINT NOT NULL,
    PRIMARY KEY (period, owner)
);

CREATE TABLE requests (
    idempotency_key TEXT PRIMARY KEY,
    request_digest TEXT NOT NULL,
    started_at BIGINT NOT NULL,
    status INTEGER,
    answer BYTEA
);

CREATE INDEX requests_by_age ON requests (started_at);

-- The folded state; the runtime encodes label and body.
CREATE TABLE snapshots (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    saved_at BIGINT NOT NULL,
    label BYTEA NOT NULL,
    body BYTEA NOT NULL
);
