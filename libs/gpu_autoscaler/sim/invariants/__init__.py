"""What must hold at every step of a run."""
