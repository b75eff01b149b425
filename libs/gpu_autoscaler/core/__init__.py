"""Decisions, as arithmetic: no IO, no clock, no randomness, no logging, no async.

Time comes in as `as_of`, prices and availability as facts. Equal facts and policy, equal plan, byte for byte.
"""
