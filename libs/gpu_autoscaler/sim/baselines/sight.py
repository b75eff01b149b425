"""The cluster and the account as a baseline sees them: what Kubernetes and the cloud say, nothing of what comes."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import BUDGETS, NODES, PODS
from gpu_autoscaler.kube.translate.common import amounts, condition
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.sim.binding import FINISHED, accepts, is_open
from gpu_autoscaler.sim.cloud import Cloud, Machine, labels_of
from gpu_autoscaler.sim.kubernetes import Kubernetes
from gpu_autoscaler.sim.workloads import controller_of, is_waiting


@dataclass(frozen=True, slots=True)
class Held:
    """One machine that was bought, until it has ended."""

    token: str
    offer: Offer
    launched_seconds: float
    node: wire.Node | None  # None: not registered yet, or gone
    is_usable: bool  # ready, with all of its GPUs; also while it is cordoned
    has_notice: bool
    is_leaving: bool


class Slot:
    """A node to put pods on in thought: one that is there, one that is coming, or one that could be bought."""

    __slots__ = ("free", "name", "node", "offer")

    def __init__(self, name: str, node: wire.Node, free: Resources, offer: Offer) -> None:
        self.name = name
        self.node = node
        self.free = free
        self.offer = offer

    def takes(self, pod: wire.Pod, wanted: Resources) -> bool:
        """True when the pod fits and accepts the node."""
        return wanted.fits_in(self.free) and accepts(pod.spec, self.node)

    def put(self, wanted: Resources) -> None:
        """Less is free from now on."""
        self.free -= wanted


class Sight:
    """Everything that can be seen. Asked often: what was worked out is kept until something changes."""

    def __init__(self, cluster: Kubernetes, cloud: Cloud, orders: Mapping[str, Machine]) -> None:
        """`orders`: machines that were bought, by token."""
        self.leaving: set[str] = set()  # tokens
        self.refused_at: dict[str, float] = {}  # when an offer was refused last, by its key
        self.now_seconds = 0.0
        self._cluster = cluster
        self._cloud = cloud
        self._orders = orders
        self._wanted: dict[str, Resources] = {}  # by uid of the pod
        self._kept_at: tuple[int, int, int] | None = None  # the version that what follows is of
        self._held_kept: list[Held] = []
        self._bound_kept: dict[str, list[wire.Pod]] = {}
        self._slots_kept: list[tuple[Held, Slot]] = []

    @property
    def version(self) -> tuple[int, int, int]:
        """Moves with everything that could be seen to change."""
        return self._cluster.version, self._cloud.version, len(self.leaving)

    @property
    def offers(self) -> tuple[Offer, ...]:
        """Everything for sale whose price is known."""
        return tuple(offer for offer in self._cloud.offers if offer.price_micro_usd_per_hour is not None)

    def pending(self) -> list[wire.Pod]:
        """Pods of which the scheduler said that they fit nowhere, oldest first."""
        return [pod for pod in self._cluster.all(PODS) if is_waiting(pod) and _is_unschedulable(pod)]

    def held(self) -> list[Held]:
        """Machines that run or are coming, in the order in which they were bought."""
        self._look_again()
        return self._held_kept

    def node(self, name: str) -> wire.Node | None:
        """The node of this name."""
        return self._cluster.find(NODES, "", name)

    def pods_by_node(self) -> dict[str, list[wire.Pod]]:
        """Pods that are bound and have not ended, by the name of their node."""
        self._look_again()
        return self._bound_kept

    def _look_again(self) -> None:
        """Bring what is kept up to date."""
        if self._kept_at == self.version:
            return
        self._kept_at = self.version
        self._held_kept = [self._held(token, machine) for token, machine in self._orders.items() if machine.is_alive]
        self._bound_kept = self._bound()
        self._slots_kept = [(held, slot) for held in self._held_kept if (slot := self._slot(held)) is not None]

    def _bound(self) -> dict[str, list[wire.Pod]]:
        found: dict[str, list[wire.Pod]] = {}
        for pod in self._cluster.all(PODS):
            if pod.spec.node_name is not None and pod.status.phase not in FINISHED:
                found.setdefault(pod.spec.node_name, []).append(pod)
        return found

    def wanted(self, pod: wire.Pod) -> Resources:
        """What the pod asks for."""
        found = self._wanted.get(pod.metadata.uid)
        if found is None:
            found = self._wanted[pod.metadata.uid] = pod_requests(pod)
        return found

    def is_blocked(self, pod: wire.Pod) -> bool:
        """True when the pod's budget allows no eviction now."""
        budgets = (
            budget
            for budget in self._cluster.all(BUDGETS)
            if budget.metadata.namespace == pod.metadata.namespace
            and budget.spec.selector is not None
            and budget.spec.selector.match_labels.items() <= pod.metadata.labels.items()
        )
        return any(budget.status.disruptions_allowed <= 0 for budget in budgets)

    # ---- in thought

    def slots(self, *, without: frozenset[str] = frozenset(), coming: bool = True) -> list[Slot]:
        """Nodes that take pods now, and with `coming` those that will, less those of these tokens."""
        self._look_again()
        return [
            Slot(slot.name, slot.node, slot.free, slot.offer)
            for held, slot in self._slots_kept
            if held.token not in without and (coming or held.is_usable)
        ]

    def _slot(self, held: Held) -> Slot | None:
        """The room of a machine; None where no pod may come."""
        if held.is_leaving or held.has_notice:
            return None
        if not held.is_usable or held.node is None:
            return self.slot_of_offer(held.offer, held.token)
        if not is_open(held.node):
            return None
        return self._slot_of_node(held, held.node, self._bound_kept.get(held.node.metadata.name, []))

    @staticmethod
    def slot_of_offer(offer: Offer, token: str = "") -> Slot:
        """A node as this offer makes it."""
        metadata = wire.Metadata(name=token, uid=token, labels=labels_of(offer, token))
        return Slot(token, wire.Node(metadata=metadata), offer.resources, offer)

    def _slot_of_node(self, held: Held, node: wire.Node, pods: list[wire.Pod]) -> Slot:
        free = amounts(node.status.allocatable, of=node.metadata.name)
        for pod in pods:
            free -= self.wanted(pod)
        return Slot(held.token, node, free, held.offer)

    def _held(self, token: str, machine: Machine) -> Held:
        node = self._cluster.find(NODES, "", machine.node_name)
        is_usable = False
        if node is not None:
            ready = condition(node.status.conditions, "Ready")
            gpu_count = amounts(node.status.allocatable, of=node.metadata.name).gpu_count
            is_ready = ready is not None and ready.status == "True"
            is_usable = is_ready and gpu_count >= machine.offer.resources.gpu_count
        return Held(
            token=token,
            offer=machine.offer,
            launched_seconds=self.now_seconds - (self._cluster.now() - machine.launched_at).total_seconds(),
            node=node,
            is_usable=is_usable,
            has_notice=machine.notice is not None,
            is_leaving=token in self.leaving,
        )


def is_protected(pod: wire.Pod) -> bool:
    """True for a pod that says it must not be moved, or that nobody would make again."""
    told = pod.metadata.annotations
    is_kept = told.get(labels.SAFE_TO_EVICT) == "false" or told.get(labels.KARPENTER_DO_NOT_DISRUPT) == "true"
    return is_kept or controller_of(pod) is None


def _is_unschedulable(pod: wire.Pod) -> bool:
    scheduled = condition(pod.status.conditions, "PodScheduled")
    return scheduled is not None and scheduled.status == "False"
