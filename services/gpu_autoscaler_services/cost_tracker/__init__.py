"""Charges every instance to the micro-dollar, and says who owes it."""
