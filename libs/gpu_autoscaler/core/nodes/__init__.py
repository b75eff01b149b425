"""A node as all streams together know it: which records speak of it, and the phase of its life.

Doors: `life.py` for nodes, `correlation.py` for records.
"""
