"""Charges every instance to the micro-dollar and allocates the cost."""
