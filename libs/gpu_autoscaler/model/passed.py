"""What a purchase passed over: offers of less price, and preferences. Part of its reason (`model/reasons.py`)."""

import enum

import msgspec


class RejectionCause(enum.StrEnum):
    """Why the offer of least price was not taken."""

    UNAVAILABLE = "unavailable"  # the cloud had none lately
    SPOT_NOT_ALLOWED = "spot_not_allowed"  # it may be taken back, and the work must not be
    LIMIT = "limit"  # it would pass a limit
    RESERVED_FIRST = "reserved_first"  # what is reserved is paid already
    POOL_PRIORITY = "pool_priority"  # its pool comes later
    INTERRUPTION_RATE = "interruption_rate"  # too many nodes are taken there
    STORM_SHARE = "storm_share"  # one storm there would take too much
    EXPECTED_COST = "expected_cost"  # it costs more with its boot and what interruptions undo
    FLEET_COST = "fleet_cost"  # dearer alone, cheaper for all that is bought together


class RejectedOffer(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The offer of least price that would do for the same work, and why it was not taken."""

    offer: str
    price_micro_usd_per_hour: int
    because: RejectionCause


class DroppedPreference(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Something that the work would have liked, and what would have kept it."""

    preference: str  # in words
    kept_by: str | None = None  # the cheapest offer that would have kept it, alone; None: nothing that may be had now
    price_micro_usd_per_hour: int = 0  # of that offer
