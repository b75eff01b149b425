"""Skips ticks that cannot change anything, and proves it by differential runs."""
