"""Decides what the cluster should become, and carries it out: the plan, and its executor."""
