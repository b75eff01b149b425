"""Accepts jobs, says when each may start, and makes and releases their Kubernetes Jobs."""
