"""What the policy says about prices: from which age on one is stale, and whether it is bought by then."""

from typing import Annotated

import msgspec
from msgspec import Meta


class PricePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stale price is told always (`gpu-autoscaler offers`, a metric); whether it stops purchases is said here."""

    age_seconds_max: Annotated[
        float,
        Meta(gt=0, description="A price of which its source said nothing for so long is stale. Source: our own."),
    ] = 21_600.0
    is_stale_price_allowed: Annotated[
        bool, Meta(description="Off: nothing is bought at a stale price. Source: our own, as work waits for nodes.")
    ] = True
