"""Spot placement scores: AWS's rating of a zone's chance to provide capacity now. Optional.

Scores from 1 to 10 rate zones for a whole request and say nothing about interruptions. The lower the score of a zone
that refused, the longer its back-off. AWS answers few distinct requests per day, so there is one, sent rarely and only
after a refusal (EC2 User Guide, "Spot placement score", limits and costs; read 2026-11-22).
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.providers.aws.client import AwsClient
from gpu_autoscaler.providers.protocol import LaunchRefused

SCORES_KEPT = timedelta(hours=1)
SCORE_MAX = 10
TYPES_COUNT_MIN = 3  # AWS scores too low with fewer
# The back-off of a zone with the lowest score is this many times that of the highest (our own choice).
WAIT_TIMES_MAX = 4.0

log = structlog.get_logger()


class PlacementScores:
    """Latest scores of the region's zones, by zone id."""

    def __init__(self, client: AwsClient, count: int | None) -> None:
        """`count`: target capacity of the request; None: disabled."""
        self._client = client
        self._count = count
        self._scores: Mapping[str, int] = {}
        self._read_at: datetime | None = None

    async def extend_backoff(
        self, refused: LaunchRefused, zone_id: str | None, instance_types: Sequence[str], now: datetime
    ) -> None:
        """Extend the back-off of a spot capacity refusal, the more the lower the zone's score. Never raises."""
        if self._count is None or refused.kind != "capacity" or len(instance_types) < TYPES_COUNT_MIN:
            return
        if self._read_at is None or now - self._read_at >= SCORES_KEPT:
            self._read_at = now
            try:
                self._scores = await self._read(instance_types)
            except AutoscalerError as exc:
                log.warning("placement score lookup failed", error=str(exc), effect="back-offs keep their default")
        score = self._scores.get(zone_id or "")
        if score is not None:
            refused.retry_after_seconds *= 1 + (WAIT_TIMES_MAX - 1) * (SCORE_MAX - score) / (SCORE_MAX - 1)

    async def _read(self, instance_types: Sequence[str]) -> dict[str, int]:
        scores: dict[str, int] = {}
        async for page in self._client.pages(
            "GetSpotPlacementScores",
            InstanceTypes=list(instance_types),
            TargetCapacity=self._count,
            SingleAvailabilityZone=True,
            RegionNames=[self._client.region],
        ):
            scores |= {score["AvailabilityZoneId"]: int(score["Score"]) for score in page["SpotPlacementScores"]}
        return scores
