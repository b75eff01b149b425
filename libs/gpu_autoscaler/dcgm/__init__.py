"""Reads NVIDIA's DCGM exporter: pages over HTTP, and what their lines mean."""
