"""Why an offer is not to be had, where that is known before it is asked for. Used by every driver; knows no cloud."""

import msgspec

from gpu_autoscaler.model.offers import Bar


class Barred(msgspec.Struct, frozen=True):
    """What keeps it, and in whole words; neither: it can be had."""

    by: Bar | None = None
    because: str | None = None


OPEN = Barred()


def first_of(*bars: Barred) -> Barred:
    """Return the first that keeps it, if any does."""
    return next((bar for bar in bars if bar.by is not None), OPEN)


def by_quota(because: str | None) -> Barred:
    """Return what a quota says; None: it has room."""
    return OPEN if because is None else Barred(Bar.QUOTA, because)
