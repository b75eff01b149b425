"""Numbered SQL scripts; each is applied once and never edited after a release."""
