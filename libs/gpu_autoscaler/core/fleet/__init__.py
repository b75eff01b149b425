"""The cheapest fleet for what waits: from classes of pods and offers to how many nodes of each offer.

Called by `core/scale_up.py`. Arithmetic on arrays, with no names of pods, zones or types: those stay with the caller.
"""
