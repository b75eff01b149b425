"""Clouds: what they sell, and how an order becomes an instance. One folder a cloud, one line in the registry."""
