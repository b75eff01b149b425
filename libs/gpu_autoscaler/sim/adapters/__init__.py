"""The adapters of a simulated run: bus, Kubernetes API, provider, store, snapshots."""
