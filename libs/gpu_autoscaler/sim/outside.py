"""Builds the adapters through which each process reaches the simulation."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from gpu_autoscaler.core.documents import effective_policy
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.events.scaling import ScalingLaunchRefused
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.sim.capacity import SimCapacity, SimExporters, SimMetadata, SimStore, StoreTrouble
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.sim.crew import Seen
from gpu_autoscaler.sim.events import Events, SimEventQueue
from gpu_autoscaler.sim.groups import Groups
from gpu_autoscaler.sim.kube import SimKube, WatchTrouble
from gpu_autoscaler.sim.onlooker import Onlooker
from gpu_autoscaler.sim.process import Process
from gpu_autoscaler.sim.seat import Glance, Roles, Seat
from gpu_autoscaler.sim.starting import SimStreams
from gpu_autoscaler.sim.store import Tables
from gpu_autoscaler.sim.workloads import Workloads


@dataclass(frozen=True, slots=True)
class Outside:
    """The simulation as its processes reach it."""

    identity: Cluster
    workloads: Workloads
    groups: Groups
    cloud: Cloud
    onlooker: Onlooker
    tables: Tables = field(default_factory=Tables)
    store_trouble: StoreTrouble = field(default_factory=StoreTrouble)
    watch_trouble: WatchTrouble = field(default_factory=WatchTrouble)
    events: Events | None = None  # None: the cloud has no queue, and metadata responds

    def seat(self, process: Process, policy: ScalingPolicy, *, on_refused_plan: Callable[[], None]) -> Seat:
        """Return the adapters of this process."""
        gate = process.gate
        is_closed = self.events is not None and self.events.is_metadata_closed
        return Seat(
            view=process.view,
            policy=policy,
            clock=process.clock,
            cluster=self.identity,
            kube=SimKube(
                gate,
                process.clock,
                self.identity,
                self.workloads,
                self.groups,
                self.watch_trouble,
                self.onlooker,
            ),
            provider=SimCapacity(
                gate, self.cloud, self.onlooker, lambda: process.view.last_sequence(ScalingLaunchRefused.stream())
            ),
            store=SimStore(gate, self.tables, self.store_trouble),
            metadata=lambda address: SimMetadata(gate, self.cloud, address, is_closed=is_closed),
            events=None if self.events is None or not self.events.is_open else SimEventQueue(gate, self.events),
            exporters=SimExporters(gate, self.cloud),
            streams=SimStreams(gate, process.record),
            seed=process.seed,
            on_refused_plan=on_refused_plan,
        )


def glances_of(roles: Roles, policy: Callable[[], ScalingPolicy], *, skips_ticks: bool) -> Mapping[str, Seen | None]:
    """Return the tick inputs of each role; None for roles whose every tick is called.

    `policy` returns the active policy file: every live process was started with it.
    """
    return {
        name: partial(_glanced, role.glance, policy) if skips_ticks and role.glance is not None else None
        for name, role in roles.items()
    }


def _glanced(glance: Glance, policy: Callable[[], ScalingPolicy], view: StateView, now: datetime) -> Hashable:
    return glance(view, effective_policy(policy(), view.state.policy_documents), now)
