"""The simulated cluster and cloud."""
