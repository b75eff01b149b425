"""The fake Google Cloud prepared as the cloud of a simulated cluster."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from gpu_autoscaler.providers.gcp import GcpOptions
from gpu_autoscaler.simcloud.gcp.catalog import TYPES
from gpu_autoscaler.simcloud.gcp.fake import PROJECT, GcpFake
from gpu_autoscaler.simcloud.gcp.fleet_emulator import GcpFleet
from gpu_autoscaler.simcloud.rest import serving_rest
from gpu_autoscaler.simcloud.seeded import SeededCloud


def seed(now: Callable[[], datetime], texts: Path) -> SeededCloud:  # noqa: ARG001 - it has none: nodes read metadata
    """Return it with a managed group for each type in each zone, spot and on-demand."""
    fake = GcpFake(now=now)
    return SeededCloud(
        fleet=GcpFleet(fake),
        catalog=TYPES,
        settings=GcpOptions(project=PROJECT, groups=tuple(fake.offer_everything())),
        serving=lambda port: serving_rest(fake, port=port),
    )
