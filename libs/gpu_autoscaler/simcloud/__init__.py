"""Clouds to try a driver against: the calls that we make, answered as the real ones do, with faults. Extra `fakes`."""
