-- To delete jobs that ended long ago, however many older ones are open.
CREATE INDEX jobs_by_end ON jobs (finished_at) WHERE finished_at IS NOT NULL;
