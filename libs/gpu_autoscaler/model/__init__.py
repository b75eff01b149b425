"""The domain model: imports only msgspec and the standard library, and does no IO."""
