"""Reads NVIDIA's DCGM exporter: scrapes pages over HTTP and parses them."""
