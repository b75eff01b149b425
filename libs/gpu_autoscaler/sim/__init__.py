"""The whole system in one process under virtual time: the same service classes, a model of the world, and faults.

One seed and one commit are one run, byte for byte. The services come in by a factory (`seat.py: Compose`); nothing
here imports one. `simcluster` is the cluster that looks real from outside; this is the model that runs fast.
"""
