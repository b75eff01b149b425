-- The folded state, as the runtime wrote it. Label and body are the runtime's own: nothing is decided by them here.
CREATE TABLE snapshots (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kept_at INTEGER NOT NULL,
    label BLOB NOT NULL,
    body BLOB NOT NULL
);
