"""The cheapest fleet for a set of shapes."""
