"""Which nodes to buy: offers, selection, gangs, batching, back-off."""
