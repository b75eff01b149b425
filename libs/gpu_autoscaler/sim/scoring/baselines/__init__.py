"""Baselines that the scores compare with."""
