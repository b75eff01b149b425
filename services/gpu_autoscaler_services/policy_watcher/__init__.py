"""Policies that are objects of Kubernetes, judged and answered."""
