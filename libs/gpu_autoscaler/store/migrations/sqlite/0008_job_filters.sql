-- For lists of jobs by name and by user, newest first.
CREATE INDEX jobs_by_name ON jobs (spec ->> 'job_name', number);
CREATE INDEX jobs_by_user ON jobs (spec ->> 'submitted_by', number);
