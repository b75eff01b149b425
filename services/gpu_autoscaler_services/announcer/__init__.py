"""Says on Kubernetes objects what becomes of them."""
