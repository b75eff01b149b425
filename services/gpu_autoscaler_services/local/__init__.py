"""The whole system on one machine: a real NATS server, a simulated cluster, and every service as its own process."""
