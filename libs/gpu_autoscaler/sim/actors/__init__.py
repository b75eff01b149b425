"""Who acts in a simulated world: users, services, operators, policies."""
