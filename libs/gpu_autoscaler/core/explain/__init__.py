"""Explanations for people: stories, status lines, Kubernetes Events, differences between plans."""
