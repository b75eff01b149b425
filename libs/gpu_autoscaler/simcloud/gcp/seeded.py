"""The fake of Google Cloud as the nodes of a simulated cluster are bought from it."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from gpu_autoscaler.providers.gcp import GcpOptions
from gpu_autoscaler.simcloud.gcp.catalog import TYPES
from gpu_autoscaler.simcloud.gcp.fake import PROJECT, GcpFake
from gpu_autoscaler.simcloud.gcp.fleet_emulator import GcpBooks
from gpu_autoscaler.simcloud.rest import serving_rest
from gpu_autoscaler.simcloud.seeded import Standing


def stand(now: Callable[[], datetime], texts: Path) -> Standing:  # noqa: ARG001 - it has none: nodes read metadata
    """Return it with a managed group for each type in each zone, spot and on-demand."""
    fake = GcpFake(now=now)
    return Standing(
        books=GcpBooks(fake),
        catalogue=TYPES,
        settings=GcpOptions(project=PROJECT, groups=tuple(fake.offer_everything())),
        serving=lambda port: serving_rest(fake, port=port),
    )
