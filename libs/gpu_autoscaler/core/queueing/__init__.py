"""Which queued jobs start, what that is expected to take, and what they have spent. Called by the scheduler."""
