"""Spot placement scores: how likely AWS finds it that so many instances are had in a zone now. By choice.

They are of the request as a whole, of zones, from 1 to 10, and say nothing of interruptions. A zone that refused is
left alone for longer the lower its score is. AWS answers few different requests a day, so it is one, and asked seldom,
after a refusal (EC2 User Guide, "Spot placement score", its limits and costs; read 2026-11-22).
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.providers.aws.calls import AwsClient
from gpu_autoscaler.providers.protocol import LaunchRefused

SCORES_KEPT = timedelta(hours=1)
SCORE_MAX = 10
TYPES_COUNT_MIN = 3  # of fewer, AWS scores too low
# A zone with the lowest score is left alone so many times as long as one with the highest (our own choice).
WAIT_TIMES_MAX = 4.0

log = structlog.get_logger()


class PlacementScores:
    """Scores of the region's zones, by zone id, as they were told last."""

    def __init__(self, calls: AwsClient, count: int | None) -> None:
        """`count`: for how many instances; None: nothing is asked."""
        self._calls = calls
        self._count = count
        self._scores: Mapping[str, int] = {}
        self._read_at: datetime | None = None

    async def weigh(
        self, refused: LaunchRefused, zone_id: str | None, instance_types: Sequence[str], now: datetime
    ) -> None:
        """Let the refusal of spot for capacity stand longer, the lower the zone's score is. Never raises."""
        if self._count is None or refused.kind != "capacity" or len(instance_types) < TYPES_COUNT_MIN:
            return
        if self._read_at is None or now - self._read_at >= SCORES_KEPT:
            self._read_at = now
            try:
                self._scores = await self._read(instance_types)
            except AutoscalerError as exc:
                log.warning("placement scores not told, refusals stand as long as always", error=str(exc))
        score = self._scores.get(zone_id or "")
        if score is not None:
            refused.retry_after_seconds *= 1 + (WAIT_TIMES_MAX - 1) * (SCORE_MAX - score) / (SCORE_MAX - 1)

    async def _read(self, instance_types: Sequence[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        async for page in self._calls.pages(
            "GetSpotPlacementScores",
            InstanceTypes=list(instance_types),
            TargetCapacity=self._count,
            SingleAvailabilityZone=True,
            RegionNames=[self._calls.region],
        ):
            found |= {score["AvailabilityZoneId"]: int(score["Score"]) for score in page["SpotPlacementScores"]}
        return found
