-- The audit trail: entries in a hash chain, as canonical JSON. act_key: the act of a fact, empty without one.
CREATE TABLE audit (
    number BIGINT PRIMARY KEY,
    entry_id TEXT NOT NULL UNIQUE,
    act_key TEXT NOT NULL,
    entry TEXT NOT NULL,
    hash TEXT NOT NULL
);
CREATE INDEX audit_acts ON audit (act_key);
-- One row: the last entry, and the last one that retention has removed.
CREATE TABLE audit_chain (
    anchor_number BIGINT NOT NULL,
    anchor_hash TEXT NOT NULL,
    head_number BIGINT NOT NULL,
    head_hash TEXT NOT NULL
);
INSERT INTO audit_chain VALUES (
    0, '0000000000000000000000000000000000000000000000000000000000000000',
    0, '0000000000000000000000000000000000000000000000000000000000000000'
);
-- Up to where the facts of each stream are in the trail.
CREATE TABLE audit_positions (stream TEXT PRIMARY KEY, sequence BIGINT NOT NULL);
