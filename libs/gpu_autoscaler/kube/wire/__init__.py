"""Structs of Kubernetes objects."""
