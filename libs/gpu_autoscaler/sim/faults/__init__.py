"""Faults: their kinds, frequencies and schedule."""
