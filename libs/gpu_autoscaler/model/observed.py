"""Instants: timezone-aware times."""

from datetime import datetime
from typing import Annotated

import msgspec

# Instants are timezone-aware; msgspec refuses naive ones and adds `date-time` to the schema.
Instant = Annotated[datetime, msgspec.Meta(tz=True)]


def aware_instant(text: str) -> datetime | None:
    """Return an instant in ISO 8601; None for any other text, or without a time zone."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return at if at.tzinfo is not None else None
