"""One placement engine for scale-up, scale-down and scheduling."""
