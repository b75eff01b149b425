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


_Opens = Callable[[aiohttp.ClientSession, str, ClusterClock, bool], InstanceMetadata]


def _gcp(session: aiohttp.ClientSession, url: str, clock: ClusterClock, is_waiting: bool) -> InstanceMetadata:  # noqa: FBT001 - as every entry of CLIENTS
    waited_seconds = gcp.WAITED_SECONDS if is_waiting else 0
    return gcp.GcpMetadata(session, url, now=clock.now, clock_factor=clock.factor, waited_seconds=waited_seconds)


CLIENTS: Mapping[str, tuple[_Opens, str]] = {
    "aws": (lambda session, url, *_: aws.AwsMetadata(session, url), aws.LINK_LOCAL_URL),
    "azure": (lambda session, url, *_: azure.AzureMetadata(session, url), azure.LINK_LOCAL_URL),
    "gcp": (_gcp, gcp.LINK_LOCAL_URL),
}


def metadata_opener(
    provider: str, session: aiohttp.ClientSession, clock: ClusterClock, *, is_waiting: bool = True
) -> tuple[Callable[[str], InstanceMetadata], str]:
    """Return what opens the metadata at an address, and the cloud's own address.

    Who asks many instances in turn is not waiting: a read that waits for a change holds a turn of another one.
    """
    client, url = CLIENTS.get(provider, CLIENTS["aws"])
    return lambda address: client(session, address, clock, is_waiting), url
