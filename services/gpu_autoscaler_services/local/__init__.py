"""The whole system on one machine: a real NATS server, a simulated cluster, every service a process of its own."""
