"""The plan check: verifies a plan before it is published and shares no code with the planner."""
