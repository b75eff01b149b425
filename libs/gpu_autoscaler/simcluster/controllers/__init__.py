"""The controllers of the cluster. They communicate through the store, as the real ones do."""
