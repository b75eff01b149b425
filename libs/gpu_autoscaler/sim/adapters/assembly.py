"""Builds the adapters through which each process reaches the simulation."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Protocol

from gpu_autoscaler.cloudmeta.protocol import EventQueue, InstanceMetadata
from gpu_autoscaler.core.policy.documents import effective_policy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.dcgm.exporter_pages import Page
from gpu_autoscaler.events.scaling import ScalingLaunchRefused
from gpu_autoscaler.kube.checkpoint_hooks import CheckpointHooks
from gpu_autoscaler.kube.protocol import NAMESPACES, PROVISIONING_REQUESTS, QUOTAS, Cluster, KubeApi
from gpu_autoscaler.model import labels
from gpu_autoscaler.providers.protocol import CapacityProvider
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import MemoryInput, Service
from gpu_autoscaler.runtime.snapshots import Snapshots, Streams
from gpu_autoscaler.sim.adapters.interruption_queue import InterruptionQueue, SimInterruptionQueue
from gpu_autoscaler.sim.adapters.kube_api import SilentHooks, SimKube, WatchFaults
from gpu_autoscaler.sim.adapters.provider import SimExporters, SimMetadata, SimProvider, SimStore, StoreFaults
from gpu_autoscaler.sim.adapters.snapshots import SimStreams
from gpu_autoscaler.sim.adapters.store import Tables
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.replica_sets import ReplicaSets
from gpu_autoscaler.sim.invariants.observer import Observer
from gpu_autoscaler.sim.process_pool import BoundTickInputs, Process
from gpu_autoscaler.store.protocol import Store


class Exporters(Protocol):
    """Metrics pages of GPU exporters by address."""

    async def scrape(self, urls: Mapping[str, str]) -> dict[str, Page | None]:
        """Return the page of each name's URL; None for one that did not respond."""


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
    store_apart: Store  # the same one; faults of its calls have random numbers of their own
    metadata: Callable[[str], InstanceMetadata]
    interruption_queue: EventQueue | None  # the cloud's interruption queue; None: the cloud has none
    exporters: Exporters
    streams: Streams
    streams_apart: Streams  # as `store_apart`
    hooks: CheckpointHooks | None  # None: no pod has one
    seed: ClusterState  # the last snapshot state of streams that were lost
    are_quotas_watched: bool  # of Kubernetes
    are_provisioning_requests_served: bool
    are_namespaces_watched: bool  # where one has the label
    on_refused_plan: Callable[[], None]  # the plan check found a violation, which must never happen


Compose = Callable[[AdapterBundle], Service]
Resume = Callable[[AdapterBundle, MemoryInput | None], Snapshots]
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
    needs_store: bool = True  # False: it only reads snapshots at its start, and starts without them if it must
    has_memory: bool = False  # its snapshots are its own, and have its memory


Roles = Mapping[str, Role]


@dataclass(frozen=True, slots=True)
class AdapterFactory:
    """The simulation as its processes reach it."""

    identity: Cluster
    workloads: Workloads
    replica_sets: ReplicaSets
    cloud: Cloud
    observer: Observer
    tables: Tables = field(default_factory=Tables)
    store_faults: StoreFaults = field(default_factory=StoreFaults)
    watch_faults: WatchFaults = field(default_factory=WatchFaults)
    has_silent_hooks: bool = False
    interruption_queue: InterruptionQueue | None = None  # None: the cloud has no queue, and metadata responds

    def bundle(self, process: Process, policy: ScalingPolicy, *, on_refused_plan: Callable[[], None]) -> AdapterBundle:
        boundary = process.boundary
        boundary_apart = process.boundary_apart
        is_closed = self.interruption_queue is not None and self.interruption_queue.is_metadata_closed
        return AdapterBundle(
            view=process.view,
            policy=policy,
            clock=process.clock,
            cluster=self.identity,
            kube=SimKube(
                boundary,
                process.clock,
                self.identity,
                self.workloads,
                self.replica_sets,
                self.watch_faults,
                self.observer,
            ),
            provider=SimProvider(
                boundary, self.cloud, self.observer, lambda: process.view.last_sequence(ScalingLaunchRefused.stream())
            ),
            store=SimStore(boundary, self.tables, self.store_faults),
            store_apart=SimStore(boundary_apart, self.tables, self.store_faults),
            metadata=lambda address: SimMetadata(boundary, self.cloud, address, is_closed=is_closed),
            interruption_queue=None
            if self.interruption_queue is None or not self.interruption_queue.is_open
            else SimInterruptionQueue(boundary, self.interruption_queue),
            exporters=SimExporters(boundary, self.cloud),
            streams=SimStreams(boundary, process.bus),
            streams_apart=SimStreams(boundary_apart, process.bus),
            hooks=SilentHooks(boundary) if self.has_silent_hooks else None,
            seed=process.seed,
            are_quotas_watched=self.workloads.cluster.has(QUOTAS),
            are_provisioning_requests_served=self.workloads.cluster.has(PROVISIONING_REQUESTS),
            are_namespaces_watched=self._are_namespaces_watched(),
            on_refused_plan=on_refused_plan,
        )

    def _are_namespaces_watched(self) -> bool:
        cluster = self.workloads.cluster
        namespaces = cluster.all(NAMESPACES) if cluster.has(NAMESPACES) else []
        return any(labels.END_IDLE_WORKLOADS in namespace.metadata.labels for namespace in namespaces)


def tick_inputs_of_roles(
    roles: Roles, policy: Callable[[], ScalingPolicy], *, skips_ticks: bool
) -> Mapping[str, BoundTickInputs | None]:
    """Return the tick inputs of each role; None for roles whose every tick is called.

    `policy` returns the active policy file: every live process was started with it.
    """
    return {
        name: partial(_role_inputs, role.tick_inputs, policy) if skips_ticks and role.tick_inputs is not None else None
        for name, role in roles.items()
    }


def _role_inputs(
    tick_inputs: TickInputs, policy: Callable[[], ScalingPolicy], view: StateView, now: datetime
) -> Hashable:
    return tick_inputs(view, effective_policy(policy(), view.state.policy_documents), now)
