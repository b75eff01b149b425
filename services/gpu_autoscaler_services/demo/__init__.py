"""A story told on the running system: what is asked for, what is seen, and a report that checks the promises."""
