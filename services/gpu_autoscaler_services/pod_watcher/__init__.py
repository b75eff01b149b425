"""Turns what Kubernetes shows of pods, nodes, budgets and Jobs into facts."""
