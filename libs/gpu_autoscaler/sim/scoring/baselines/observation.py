"""The observable state of cluster and cloud for a baseline, without knowledge of the future."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.kube.translate.common import amounts, condition
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine, labels_of
from gpu_autoscaler.sim.cluster.controllers import controller_of, is_waiting
from gpu_autoscaler.sim.cluster.objects import Kubernetes, is_true
from gpu_autoscaler.sim.cluster.scheduler import FINISHED, accepts, is_open


@dataclass(frozen=True, slots=True)
class OwnedMachine:
    """A bought machine that has not ended."""

    token: str
    offer: Offer
    launched_seconds: float
    node: core.Node | None  # None: not registered, or removed
    is_usable: bool  # ready with all GPUs, possibly cordoned
    has_notice: bool
    is_draining: bool


@dataclass(slots=True, eq=False)
class Slot:
    """Capacity for simulated placement: of a node that is running, booting or could be bought."""

    name: str
    node: core.Node
    free: Resources
    offer: Offer

    def takes(self, pod: core.Pod, requests: Resources) -> bool:
        return requests.fits_in(self.free) and accepts(pod.spec, self.node)

    def put(self, requests: Resources) -> None:
        self.free -= requests


class Observation:
    """Everything observable. Results are cached until something changes."""

    def __init__(self, cluster: Kubernetes, cloud: Cloud, orders: Mapping[str, Machine]) -> None:
        """`orders`: bought machines by token."""
        self.draining: set[str] = set()  # tokens
        self.refused_at: dict[str, float] = {}  # time of the last refusal, by offer key
        self.now_seconds = 0.0
        self._cluster = cluster
        self._cloud = cloud
        self._orders = orders
        self._requests: dict[str, Resources] = {}  # by pod uid
        self._cached_version: tuple[int, int, int] | None = None  # version of the cached values below
        self._machines: list[OwnedMachine] = []
        self._pods_by_node: dict[str, list[core.Pod]] = {}
        self._slots: list[tuple[OwnedMachine, Slot]] = []

    @property
    def version(self) -> tuple[int, int, int]:
        """Changes with everything observable."""
        return self._cluster.version, self._cloud.version, len(self.draining)

    @property
    def offers(self) -> tuple[Offer, ...]:
        """Return available offers with a known price."""
        return tuple(offer for offer in self._cloud.offers if offer.price_micro_usd_per_hour is not None)

    def pending(self) -> list[core.Pod]:
        """Return pods marked unschedulable, oldest first."""
        return [pod for pod in self._cluster.all(PODS) if is_waiting(pod) and _is_unschedulable(pod)]

    def machines(self) -> list[OwnedMachine]:
        """Return running and booting machines, in order of purchase."""
        self._refresh()
        return self._machines

    def node(self, name: str) -> core.Node | None:
        return self._cluster.find(NODES, "", name)

    def pods_by_node(self) -> dict[str, list[core.Pod]]:
        """Return bound pods that have not ended, by node name."""
        self._refresh()
        return self._pods_by_node

    def _refresh(self) -> None:
        if self._cached_version == self.version:
            return
        self._cached_version = self.version
        self._machines = [
            self._owned_machine(token, machine) for token, machine in self._orders.items() if machine.is_alive
        ]
        self._pods_by_node = self._bind_map()
        self._slots = [(machine, slot) for machine in self._machines if (slot := self._slot(machine)) is not None]

    def _bind_map(self) -> dict[str, list[core.Pod]]:
        pods_by_node: dict[str, list[core.Pod]] = {}
        for pod in self._cluster.all(PODS):
            if pod.spec.node_name is not None and pod.status.phase not in FINISHED:
                pods_by_node.setdefault(pod.spec.node_name, []).append(pod)
        return pods_by_node

    def requests(self, pod: core.Pod) -> Resources:
        requests = self._requests.get(pod.metadata.uid)
        if requests is None:
            requests = self._requests[pod.metadata.uid] = pod_requests(pod)
        return requests

    def is_blocked(self, pod: core.Pod) -> bool:
        """True if a budget of the pod allows no eviction now."""
        return any(budget.status.disruptions_allowed <= 0 for budget in self._cluster.budgets_of(pod))

    # ---- simulated placement

    def slots(self, *, without: frozenset[str] = frozenset(), include_booting: bool = True) -> list[Slot]:
        """Return the slots of nodes that accept pods, booting ones included with `coming`, without these tokens."""
        self._refresh()
        return [
            Slot(slot.name, slot.node, slot.free, slot.offer)
            for machine, slot in self._slots
            if machine.token not in without and (include_booting or machine.is_usable)
        ]

    def _slot(self, machine: OwnedMachine) -> Slot | None:
        """Return the free capacity of a machine; None if it accepts no pods."""
        if machine.is_draining or machine.has_notice:
            return None
        if not machine.is_usable or machine.node is None:
            return self.slot_of_offer(machine.offer, machine.token)
        if not is_open(machine.node):
            return None
        name = machine.node.metadata.name
        free = amounts(machine.node.status.allocatable, of=name)
        for pod in self._pods_by_node.get(name, []):
            free -= self.requests(pod)
        return Slot(machine.token, machine.node, free, machine.offer)

    @staticmethod
    def slot_of_offer(offer: Offer, token: str = "") -> Slot:
        metadata = core.Metadata(name=token, uid=token, labels=labels_of(offer, token))
        return Slot(token, core.Node(metadata=metadata), offer.resources, offer)

    def _owned_machine(self, token: str, machine: Machine) -> OwnedMachine:
        node = self._cluster.find(NODES, "", machine.node_name)
        is_usable = False
        if node is not None:
            gpu_count = amounts(node.status.allocatable, of=node.metadata.name).gpu_count
            is_usable = is_true(node.status.conditions, "Ready") and gpu_count >= machine.offer.resources.gpu_count
        return OwnedMachine(
            token=token,
            offer=machine.offer,
            launched_seconds=self.now_seconds - (self._cluster.now() - machine.launched_at).total_seconds(),
            node=node,
            is_usable=is_usable,
            has_notice=machine.notice is not None,
            is_draining=token in self.draining,
        )


def is_protected(pod: core.Pod) -> bool:
    """True for a pod protected by annotation or without a controller."""
    annotations = pod.metadata.annotations
    is_annotated = (
        annotations.get(labels.SAFE_TO_EVICT) == "false" or annotations.get(labels.KARPENTER_DO_NOT_DISRUPT) == "true"
    )
    return is_annotated or controller_of(pod) is None


def _is_unschedulable(pod: core.Pod) -> bool:
    scheduled = condition(pod.status.conditions, "PodScheduled")
    return scheduled is not None and scheduled.status == "False"


class Buy(msgspec.Struct, frozen=True, kw_only=True):
    """Buy one node. `token` identifies the node and is never reused."""

    offer: Offer
    token: str


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """Cordon the node, evict its pods, terminate its machine when it is empty."""

    token: str
    seconds_max: float | None = None  # after which the drain is canceled; None: no limit
    is_forced: bool = False  # delete pods regardless of their budgets


class Uncordon(msgspec.Struct, frozen=True, kw_only=True):
    """Uncordon the node and cancel its drain."""

    token: str


Action = Buy | Drain | Uncordon


class Baseline(Protocol):
    """A method of sizing a cluster."""

    name: str
    scan_seconds: float  # between steps

    def step(self, observation: Observation) -> Iterable[Action]:
        """Return the actions for this observation."""
