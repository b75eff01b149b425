"""Faults: what can go wrong, and when it does."""
