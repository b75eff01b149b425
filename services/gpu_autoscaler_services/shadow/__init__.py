"""Plans live under a second policy and publishes the differences."""
