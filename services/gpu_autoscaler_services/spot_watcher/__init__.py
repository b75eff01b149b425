"""Publishes interruption notices, rebalance recommendations, offers and prices."""
