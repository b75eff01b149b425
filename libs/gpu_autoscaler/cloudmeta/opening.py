"""Every cloud's metadata by the name of its provider. A new cloud is one line here; one without has EC2's form."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Protocol

import aiohttp

from gpu_autoscaler.cloudmeta import aws, azure, gcp
from gpu_autoscaler.cloudmeta.protocol import InstanceMetadata


class ClusterClock(Protocol):
    """Cluster time, which may pass faster than wall time."""

    @property
    def factor(self) -> float:
        """How much faster."""

    def now(self) -> datetime:
        """Return cluster time, UTC."""


CLIENTS: Mapping[str, tuple[Callable[[aiohttp.ClientSession, str, ClusterClock], InstanceMetadata], str]] = {
    "aws": (lambda session, url, _: aws.AwsMetadata(session, url), aws.LINK_LOCAL_URL),
    "azure": (lambda session, url, _: azure.AzureMetadata(session, url), azure.LINK_LOCAL_URL),
    "gcp": (
        lambda session, url, clock: gcp.GcpMetadata(session, url, now=clock.now, clock_factor=clock.factor),
        gcp.LINK_LOCAL_URL,
    ),
}


def metadata_opener(
    provider: str, session: aiohttp.ClientSession, clock: ClusterClock
) -> tuple[Callable[[str], InstanceMetadata], str]:
    """Return what opens the metadata at an address, and the cloud's own address."""
    client, url = CLIENTS.get(provider, CLIENTS["aws"])
    return lambda address: client(session, address, clock), url
