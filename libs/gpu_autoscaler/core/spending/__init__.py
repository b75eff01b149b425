"""Money that was spent, that is claimed, and that is left."""
