"""Compute Engine and its prices: the calls that the driver makes, held against Google's own description of them."""
