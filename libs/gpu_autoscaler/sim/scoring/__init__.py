"""Scores of our system and of baselines in equal scenarios."""
