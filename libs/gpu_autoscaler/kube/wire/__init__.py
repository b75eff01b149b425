"""Kubernetes objects as they are on the wire."""
