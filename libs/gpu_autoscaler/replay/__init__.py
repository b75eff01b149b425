"""Recorded histories: what was recorded, and what this code or another policy would have decided.

`history` reads facts from the streams, `recording` is a history as a file, `recompute` checks one recorded plan,
`retrace` plans a whole history again, `counterfactual` simulates it under another policy.
"""
