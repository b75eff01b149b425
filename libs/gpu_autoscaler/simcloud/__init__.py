"""Fake clouds for tests of drivers: the API calls that drivers make, answered like the real ones, with faults."""
