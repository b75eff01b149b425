"""Which nodes to drain or replace, and what protects them."""
