"""Admits jobs, decides when each may start, and creates and releases their Kubernetes Jobs."""
