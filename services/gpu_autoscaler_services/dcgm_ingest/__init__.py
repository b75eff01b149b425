"""Scrapes DCGM exporters and publishes GPU samples and summaries."""
