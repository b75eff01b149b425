"""Nodes: correlation of records, lifecycle phases, views."""
