"""Actors of a simulation: users, services, operators and the policies they write."""
