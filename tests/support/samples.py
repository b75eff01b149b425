"""One reason of each kind, for tests that hold for all kinds."""

from typing import get_args

import msgspec
from tests.support.told import T0

from gpu_autoscaler.model.directives import Attribution
from gpu_autoscaler.model.reasons.base import Reason
from gpu_autoscaler.model.reasons.buy import DroppedPreference, RejectedOffer, RejectionCause

_PASSED_OVER = RejectedOffer(offer="a/b/spot", price_micro_usd_per_hour=3, because=RejectionCause.SPOT_NOT_ALLOWED)

_DROPPED = DroppedPreference(preference="zone zone-b", kept_by="a/zone-b/spot", price_micro_usd_per_hour=4)


def sample(reason: type[Reason]) -> Reason:
    """A reason of this kind, every field filled with something of its type."""
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(reason):
        kind = str(field.type)
        if "Attribution" in kind:
            values[field.name] = Attribution(key="override/pool/gpu-7", by="ada", why="upkeep", until=T0)
        elif "RejectedOffer" in kind:
            values[field.name] = _PASSED_OVER
        elif "DroppedPreference" in kind:
            values[field.name] = (_DROPPED,)
        elif "datetime" in kind:
            values[field.name] = T0
        elif "tuple" in kind:
            values[field.name] = ("job/a", "job/b")
        elif "Literal" in kind:
            values[field.name] = get_args(field.type)[0]
        elif "float" in kind:
            values[field.name] = 0.5 if field.name.endswith(("ratio", "ratio_min")) else 700.0
        elif field.name == "fault":
            values[field.name] = "silent"
        elif field.type is bool:
            values[field.name] = True
        else:
            values[field.name] = 3 if field.type in (int, int | None) else "gpu-7"
    return msgspec.convert(values, reason, strict=False, from_attributes=True)
