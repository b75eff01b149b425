"""Reasons why an offer is known to be unavailable before it is ordered. Shared by all drivers."""

import msgspec

from gpu_autoscaler.model.offers import UnavailabilityCause


class Unavailable(msgspec.Struct, frozen=True):
    """Why an offer cannot be bought: kind and sentence. Both are None if it is available."""

    by: UnavailabilityCause | None = None
    because: str | None = None


AVAILABLE = Unavailable()


def first_unavailable(*bars: Unavailable) -> Unavailable:
    """Return the first reason that applies, else AVAILABLE."""
    return next((bar for bar in bars if bar.by is not None), AVAILABLE)


def unavailable_by_quota(because: str | None) -> Unavailable:
    """Return AVAILABLE if `because` is None, else a quota shortage."""
    return AVAILABLE if because is None else Unavailable(UnavailabilityCause.QUOTA, because)
