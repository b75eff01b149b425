"""Kubernetes' objects as facts: one module a kind. Pure; percent, milli and other people's labels end here."""
