-- The folded state; the runtime encodes label and body.
CREATE TABLE snapshots (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    saved_at INTEGER NOT NULL,
    label BLOB NOT NULL,
    body BLOB NOT NULL
);
