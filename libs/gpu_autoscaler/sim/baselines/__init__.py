"""Other ways to size a cluster, acting in the simulator's world by the doors that our services use.

Each is what its documents say, as far as this world has it; the sources stand in each file. They share nothing with the
core: what is compared must not think alike.
"""
