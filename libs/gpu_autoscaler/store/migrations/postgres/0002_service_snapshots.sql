-- Snapshots of one service with a memory of its own, besides those of the whole state, whose service is empty.
ALTER TABLE snapshots ADD COLUMN service TEXT NOT NULL DEFAULT '';
