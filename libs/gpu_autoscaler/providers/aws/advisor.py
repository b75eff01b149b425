"""Interruption rates of spot instance types, from the file behind AWS's Spot Instance advisor.

AWS publishes last month's rates by region and type, in five bands (EC2 User Guide, "Spot Instance advisor"; the page
reads https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json; format as in alexei-led/spotinfo, read
2026-11-22). They are the prior; observed interruptions adjust them (`core/provisioning/spot_risk.py`).
"""

from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta

import msgspec

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.aws.options import OWNER
from gpu_autoscaler.providers.files import read_text
from gpu_autoscaler.providers.market import modified_at

BANDS_KEPT = timedelta(days=60)  # twice the published period
# Upper edge of each band, so that no type counts as calmer than AWS reports; the last band has none.
BAND_RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30)


class _Row(msgspec.Struct, frozen=True):
    r: int  # index of the band


class _Advice(msgspec.Struct, frozen=True):
    spot_advisor: Mapping[str, Mapping[str, Mapping[str, _Row]]]  # region, system, type
    read_on: date | None = None  # ours, as the modification time of a mounted file is that of its pod


class Bands(msgspec.Struct, frozen=True, kw_only=True):
    """Interruption rates of a region, with their date."""

    ratios: Mapping[str, float] = {}  # by type
    dated_at: datetime | None = None  # None: no file

    def ratio(self, instance_type: str, now: datetime) -> float | None:
        """Return the share of instances interrupted; None if unknown or outdated."""
        return self.ratios.get(instance_type) if self.is_current(now) else None

    def is_current(self, now: datetime) -> bool:
        """Return whether the bands exist and are not outdated."""
        return self.dated_at is not None and now - self.dated_at <= BANDS_KEPT


def bands_of(path: str | None, region: str) -> Bands:
    """Return the bands in the file, dated by the day that it names, or by its modification. Raises ConfigError."""
    if path is None:
        return Bands()
    try:
        advice = msgspec.json.decode(read_text(OWNER, path), type=_Advice)
    except msgspec.DecodeError as exc:
        raise ConfigError(OWNER, [f"{path}: is not Spot Instance advisor data: {exc}"]) from exc
    rows = advice.spot_advisor.get(region, {}).get("Linux", {})
    if not rows:
        raise ConfigError(OWNER, [f"{path}: has no data for {region}; download it again, or correct aws.region"])
    ratios = {name: BAND_RATIOS[row.r] for name, row in rows.items() if 0 <= row.r < len(BAND_RATIOS)}
    read_at = modified_at(path) if advice.read_on is None else datetime.combine(advice.read_on, time(), UTC)
    return Bands(ratios=ratios, dated_at=read_at)
