"""Nouns of the whole system. Imports msgspec and the standard library, nothing of ours, does no IO."""
