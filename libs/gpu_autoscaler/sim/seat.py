"""What a service is put together from in a run: the same protocols as live, each with the run's own adapter behind it.

`services/gpu_autoscaler_services/simulation.py` is the one place that knows how; it hands its functions in.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gpu_autoscaler.cloudmeta.protocol import EventQueue, InstanceMetadata
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.dcgm.parse import Page
from gpu_autoscaler.kube.protocol import Cluster, KubeApi
from gpu_autoscaler.providers.protocol import CapacityProvider
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler.runtime.snapshots import Snapshots, Streams
from gpu_autoscaler.store.protocol import Store

METADATA_URL = "sim://{node_name}/metadata"
EXPORTER_URL = "sim://{node_name}/metrics"


def node_of(address: str) -> str:
    """Return the name of the node that an address of the two forms above is on."""
    return address.removeprefix("sim://").partition("/")[0]


class Exporters(Protocol):
    """Pages of GPU exporters by address."""

    async def scrape(self, urls: Mapping[str, str]) -> dict[str, Page | None]:
        """Return the page of each name's URL; None for one that did not answer."""
        ...


@dataclass(frozen=True, slots=True)
class Seat:
    """Everything that one process reaches."""

    view: StateView
    policy: ScalingPolicy
    clock: Clock
    cluster: Cluster
    kube: KubeApi
    provider: CapacityProvider
    store: Store
    metadata: Callable[[str], InstanceMetadata]
    events: EventQueue | None  # of the cloud; None: it has none
    exporters: Exporters
    streams: Streams
    seed: ClusterState  # the last that was kept of streams that are lost
    on_refused_plan: Callable[[], None]  # the second opinion found a mistake: never to happen


Compose = Callable[[Seat], Service]
Resume = Callable[[Seat], Snapshots]
# What a tick's answer depends on besides the service's own memory. Equal to the last one's, after which there was
# nothing to say: there is nothing to say now.
Glance = Callable[[StateView, ScalingPolicy, datetime], Hashable]


@dataclass(frozen=True, slots=True)
class Role:
    """One process of the running system."""

    compose: Compose
    glance: Glance | None = None  # None: every tick is called
    snapshots: Resume | None = None  # None: it begins with the oldest facts
    keeps_snapshots: bool = False


Roles = Mapping[str, Role]
