"""Simulation of the whole system in one process under virtual time: real services, simulated cluster and cloud, faults.

One seed and one commit give one run, byte for byte. Services are passed in by factories (`adapters/assembly.py:
Compose`); nothing here imports one. `simcluster` serves real APIs to real processes; this simulation is built for
speed.
"""
