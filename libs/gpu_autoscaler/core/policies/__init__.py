"""The parts of the policy, a module each. `core/policy.py` puts them together."""
