"""How often AWS says that it takes spot instances of a type: bands, from the file behind its Spot Instance advisor.

What is published is the last month's, by region and type, in five bands (EC2 User Guide, "Spot Instance advisor"; the
page reads https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json; form as alexei-led/spotinfo reads it, read
2026-11-22). It is where we begin; what happened to our own instances goes on from there (`core/interruptions.py`).
"""

from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta

import msgspec

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.aws.options import OWNER
from gpu_autoscaler.providers.files import modified_at, read_text

BANDS_KEPT = timedelta(days=60)  # twice what they tell of: older, they say nothing of today
# Each by its upper edge, so that no place is taken for calmer than AWS says; the last has none.
BAND_RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30)


class _Row(msgspec.Struct, frozen=True):
    r: int  # number of the band


class _Advice(msgspec.Struct, frozen=True):
    spot_advisor: Mapping[str, Mapping[str, Mapping[str, _Row]]]  # region, system, type
    read_on: date | None = None  # ours, where the file's own date says nothing: a mounted one is as old as its pod


class Bands(msgspec.Struct, frozen=True, kw_only=True):
    """The bands of a region, and since when they are known."""

    ratios: Mapping[str, float] = {}  # by type
    dated_at: datetime | None = None  # None: nobody gave them

    def ratio(self, instance_type: str, now: datetime) -> float | None:
        """Return the share that is taken, None where nothing is said, or only what is too old."""
        return self.ratios.get(instance_type) if self.is_of_use(now) else None

    def is_of_use(self, now: datetime) -> bool:
        """False for bands that are too old to say anything."""
        return self.dated_at is not None and now - self.dated_at <= BANDS_KEPT


def bands_of(path: str | None, region: str) -> Bands:
    """Return the bands in the file, as of the day that it names, or of when it was written. Raises ConfigError."""
    if path is None:
        return Bands()
    try:
        told = msgspec.json.decode(read_text(OWNER, path), type=_Advice)
    except msgspec.DecodeError as exc:
        raise ConfigError(OWNER, [f"{path}: is not what the Spot Instance advisor publishes: {exc}"]) from exc
    rows = told.spot_advisor.get(region, {}).get("Linux", {})
    if not rows:
        raise ConfigError(OWNER, [f"{path}: says nothing of {region}; fetch it anew, or correct aws.region"])
    ratios = {name: BAND_RATIOS[row.r] for name, row in rows.items() if 0 <= row.r < len(BAND_RATIOS)}
    read_at = modified_at(path) if told.read_on is None else datetime.combine(told.read_on, time(), UTC)
    return Bands(ratios=ratios, dated_at=read_at)
