"""Skips ticks that would publish nothing new, and proves it by differential runs."""
