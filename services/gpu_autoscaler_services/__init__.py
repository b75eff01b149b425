"""The running system: one folder a service, the registry, the wiring, the command line."""
