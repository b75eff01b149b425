"""Job queue: schedule, estimates, job budgets."""
