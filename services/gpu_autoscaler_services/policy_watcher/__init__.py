"""Accepts or refuses AutoscalingPolicy objects and writes their status."""
