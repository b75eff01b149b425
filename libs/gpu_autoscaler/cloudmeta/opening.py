"""Instance metadata by provider name. A new cloud is one line here; an unknown one uses EC2's format."""

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
        """Return the factor."""

    def now(self) -> datetime:
        """Return cluster time, UTC."""


_Opens = Callable[[aiohttp.ClientSession, str, ClusterClock, bool], InstanceMetadata]


def _gcp(session: aiohttp.ClientSession, url: str, clock: ClusterClock, is_waiting: bool) -> InstanceMetadata:  # noqa: FBT001 - as every entry of CLIENTS
    wait_seconds = gcp.WAIT_SECONDS if is_waiting else 0
    return gcp.GcpMetadata(session, url, now=clock.now, clock_factor=clock.factor, wait_seconds=wait_seconds)


CLIENTS: Mapping[str, tuple[_Opens, str]] = {
    "aws": (lambda session, url, *_: aws.AwsMetadata(session, url), aws.LINK_LOCAL_URL),
    "azure": (lambda session, url, *_: azure.AzureMetadata(session, url), azure.LINK_LOCAL_URL),
    "gcp": (_gcp, gcp.LINK_LOCAL_URL),
}


def metadata_opener(
    provider: str, session: aiohttp.ClientSession, clock: ClusterClock, *, is_waiting: bool = True
) -> tuple[Callable[[str], InstanceMetadata], str]:
    """Return a function that opens the metadata at a URL, and the cloud's link-local URL.

    Without `is_waiting` a read returns at once: for a caller that polls many instances in turn.
    """
    client, url = CLIENTS.get(provider, CLIENTS["aws"])
    return lambda base_url: client(session, base_url, clock, is_waiting), url
