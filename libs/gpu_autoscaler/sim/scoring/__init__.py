"""Scores of our system and of baselines in the same worlds."""
