"""Watches pods, nodes, PodDisruptionBudgets and Jobs in Kubernetes."""
