"""The rules of the second opinion, a module each.

`core/check.py` asks them all; none of them reads how `plan` came to what it says.
"""
