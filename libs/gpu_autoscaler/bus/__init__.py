"""Transports facts: one protocol, two adapters (NATS, memory), one declarative list of streams and consumers."""
