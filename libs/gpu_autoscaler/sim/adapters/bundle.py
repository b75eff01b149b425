"""The adapters from which a service is composed: the same protocols as live, implemented by the simulation.

`services/gpu_autoscaler_services/simulation.py` composes the services and passes its functions in.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gpu_autoscaler.cloudmeta.protocol import EventQueue, InstanceMetadata
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.dcgm.exporter_pages import Page
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
    """Return the node name in an address of the two forms above."""
    return address.removeprefix("sim://").partition("/")[0]


class Exporters(Protocol):
    """Metrics pages of GPU exporters by address."""

    async def scrape(self, urls: Mapping[str, str]) -> dict[str, Page | None]:
        """Return the page of each name's URL; None for one that did not respond."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterBundle:
    """All adapters of one process."""

    view: StateView
    policy: ScalingPolicy
    clock: Clock
    cluster: Cluster
    kube: KubeApi
    provider: CapacityProvider
    store: Store
    metadata: Callable[[str], InstanceMetadata]
    interruption_queue: EventQueue | None  # the cloud's interruption queue; None: the cloud has none
    exporters: Exporters
    streams: Streams
    seed: ClusterState  # the last snapshot state of streams that were lost
    on_refused_plan: Callable[[], None]  # the plan check found a violation, which must never happen


Compose = Callable[[AdapterBundle], Service]
Resume = Callable[[AdapterBundle], Snapshots]
# What a tick's outcome depends on besides the service's own memory. If it equals that of the last tick, which published
# nothing, the tick is skipped.
TickInputs = Callable[[StateView, ScalingPolicy, datetime], Hashable]


@dataclass(frozen=True, slots=True)
class Role:
    """One process of the running system."""

    compose: Compose
    tick_inputs: TickInputs | None = None  # None: every tick is called
    snapshots: Resume | None = None  # None: it starts from the oldest facts
    keeps_snapshots: bool = False


Roles = Mapping[str, Role]
