"""Writes Kubernetes Events on pods and nodes."""
