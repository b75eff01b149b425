"""Limits of nodes, GPUs and spend, and what counts against them."""
