"""Simulates the whole system in one process: services, cluster, cloud, faults and an invariant monitor.

One seed and one commit give one run, byte for byte. Services are passed in by factories (`adapters/assembly.py:
Compose`); nothing here imports one.
"""
