"""Turns DCGM exporter pages into facts about GPUs."""
