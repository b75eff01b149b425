"""Event-driven GPU cluster scaling: facts arrive, fold makes them a state, plan makes the state a plan."""
