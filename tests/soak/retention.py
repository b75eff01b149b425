"""The retention of the soak: at least a hundredfold shorter, so that every stream discards during the run.

`limits_of` gives what each stream keeps. The services repeat living objects and full lists in proportion to the
retention; these intervals are shortened with it.
"""

from collections.abc import Mapping

import msgspec

from gpu_autoscaler.bus import streams as declared
from gpu_autoscaler.bus.streams import StreamLimits, StreamSpec

SHORTER = 100
RUN_RATIO = 0.6  # of the run: no stream keeps anything longer, so that each discards
# A stream must keep messages of a killed process until it has started again.
AGE_SECONDS_MIN = 300
# A hundredth of the bytes does not hold 10,000 living pods: each stream keeps at least what is alive, several times.
MEBIBYTES_MIN: Mapping[str, int] = {"POD": 96, "NODE": 32, "GPU": 32, "SCALING": 24}
MEBIBYTES_MIN_OTHERS = 8
# A repeat within the window has the id of the first publication and is dropped: repeats begin at half the age.
WINDOWS_PER_AGE_MIN = 5
RESYNC_SECONDS = 2.0  # instead of 60: a pass repeats at most 1,000 objects, and 10,000 are alive
FULL_LIST_SECONDS = 60.0  # instead of 30 minutes


def limits_of(minutes: float) -> dict[str, StreamLimits]:
    """Return what each stream keeps in a run of this length."""
    age_max = round(minutes * 60 * RUN_RATIO)
    return {
        spec.name: StreamLimits(
            max_age_seconds=max(AGE_SECONDS_MIN, min(spec.max_age_seconds // SHORTER, age_max)),
            max_bytes=max(
                spec.max_bytes // SHORTER, MEBIBYTES_MIN.get(spec.name, MEBIBYTES_MIN_OTHERS) * declared.MEBIBYTE
            ),
        )
        for spec in declared.STREAMS
    }


def shortened(minutes: float) -> tuple[StreamSpec, ...]:
    """Return all streams with this retention; messages with an age of their own expire a hundredfold earlier, and
    message ids are remembered for less than half the retention."""
    return tuple(
        msgspec.structs.replace(
            spec,
            duplicate_window_seconds=min(spec.duplicate_window_seconds, spec.max_age_seconds // WINDOWS_PER_AGE_MIN),
            message_ttls=tuple(
                msgspec.structs.replace(ttl, ttl_seconds=ttl.ttl_seconds // SHORTER) for ttl in spec.message_ttls
            ),
        )
        for spec in declared.streams(limits_of(minutes))
    )
