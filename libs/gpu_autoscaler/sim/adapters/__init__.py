"""Adapters of the services to the simulation: bus, Kubernetes API, provider, store, snapshots, interruption queue."""
