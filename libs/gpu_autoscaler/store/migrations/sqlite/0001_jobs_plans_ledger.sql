-- Instants are microseconds since 1970 UTC; documents are JSON. `number` is the order of arrival, and the cursor.

CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL UNIQUE,
    project_id TEXT NOT NULL,
    request_digest TEXT NOT NULL,
    spec TEXT NOT NULL,
    accepted_at INTEGER NOT NULL,
    outcome TEXT,
    finished_at INTEGER
);

CREATE INDEX jobs_by_project ON jobs (project_id, number);

CREATE TABLE plans (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    plan_id TEXT NOT NULL UNIQUE,
    made_at INTEGER NOT NULL,
    fact TEXT NOT NULL
);

-- An instance's time is charged once: spans of an instance follow each other without a gap.
CREATE TABLE ledger (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    provider_id TEXT NOT NULL,
    from_at INTEGER NOT NULL,
    to_at INTEGER NOT NULL,
    total_micro_usd INTEGER NOT NULL,
    idle_micro_usd INTEGER NOT NULL,
    fact TEXT NOT NULL,
    is_confirmed INTEGER NOT NULL DEFAULT 0,
    UNIQUE (provider_id, from_at)
);

-- Spans not yet confirmed to be on the stream.
CREATE INDEX ledger_unconfirmed ON ledger (number) WHERE is_confirmed = 0;

-- Sums of the ledger, updated in the same transaction, so that a start does not read years of it.
CREATE TABLE charged_instances (
    provider_id TEXT PRIMARY KEY,
    from_at INTEGER NOT NULL,
    last_number INTEGER NOT NULL REFERENCES ledger (number),
    total_micro_usd INTEGER NOT NULL
);

CREATE TABLE charged_jobs (
    job_id TEXT PRIMARY KEY,
    allocated_micro_usd INTEGER NOT NULL
);

CREATE TABLE requests (
    idempotency_key TEXT PRIMARY KEY,
    request_digest TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    status INTEGER,
    answer BLOB
);

CREATE INDEX requests_by_age ON requests (started_at);
