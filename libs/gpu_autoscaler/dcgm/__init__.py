"""Reads NVIDIA's DCGM exporter, and NVML where there is no DCGM."""
