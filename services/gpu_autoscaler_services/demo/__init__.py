"""A scenario on the running system: requests, observed facts, and a report that checks the promises."""
