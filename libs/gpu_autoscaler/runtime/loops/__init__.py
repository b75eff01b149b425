"""The loops of a service: fold, effects, tick, watch."""
