-- The pod template of a job's members, as JSON; empty for jobs of the short form. It goes with the row of its job.
ALTER TABLE jobs ADD COLUMN template TEXT;
