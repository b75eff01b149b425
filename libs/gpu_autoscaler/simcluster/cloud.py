"""The simulated cloud: offers, machines, refusals and reclaimed instances. No HTTP, never waits.

A controller like the others: `step` does what is due in cluster time. It writes node objects as kubelets and the node
life cycle do; nodes deleted by somebody else stay deleted.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial

import msgspec

from gpu_autoscaler.events.spot import NoticeKind
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, RefusalKind, RefusalScope
from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.controllers.nodes import LEASE_NAMESPACE
from gpu_autoscaler.simcluster.controllers.protocol import Agenda
from gpu_autoscaler.simcluster.instances import Machine, Notice, new_machine, shown_gpus
from gpu_autoscaler.simcluster.kinds import LEASES, NODES
from gpu_autoscaler.simcluster.objects import Json, phase_of, set_condition, stamp_micro
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG, InstanceType, capacity_of, offers_of
from gpu_autoscaler.simcluster.store import Change

# Shares of the boot time at which each step is done; GPUs are allocatable at its end.
RUNNING_AT_RATIO = 0.2
REGISTERED_AT_RATIO = 0.6
READY_AT_RATIO = 0.75

NOTICE_SECONDS = 120.0  # EC2 User Guide, "Spot Instance interruption notices" (read 2026-11-21)
TERMINATION_SECONDS = 5.0  # fixture: from the termination request to the end of billing
NODE_FORGOTTEN_SECONDS = 5.0  # cloud-controller-manager's --node-monitor-period, after which the node is deleted
LOST_NODE_FORGOTTEN_SECONDS = 45.0  # a reclaimed one first misses its heartbeats (--node-monitor-grace-period 40 s)
TERMINATED_SHOWN_SECONDS = 3600.0  # EC2 User Guide, "Terminate Amazon EC2 instances": visible for about an hour
RETRY_AFTER_SECONDS = 180.0  # as Karpenter's unavailable offerings (karpenter-provider-aws, pkg/cache)
REFUSAL_RULES_MAX = 100
LEASE_RENEW_SECONDS = 10.0  # kubelet renews at a quarter of nodeLeaseDurationSeconds, 40 s by default
LEASE_SECONDS = 40
KUBELET_VERSION = "v1.36.3"
GPU_MEMORY_LABEL = "nvidia.com/gpu.memory"  # MiB, by NVIDIA's GPU feature discovery

_PRESSURES = (
    ("MemoryPressure", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    ("DiskPressure", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
)

# Kind and scope of each refusal code: capacity concerns an offer, quotas the region.
REFUSALS: dict[str, tuple[RefusalKind, RefusalScope]] = {
    "InsufficientInstanceCapacity": ("capacity", "offer"),
    "UnfulfillableCapacity": ("capacity", "offer"),
    "Unsupported": ("capacity", "offer"),
    "InsufficientFreeAddressesInSubnet": ("capacity", "zone"),
    "MaxSpotInstanceCountExceeded": ("quota", "region"),
    "VcpuLimitExceeded": ("quota", "region"),
    "UnauthorizedOperation": ("permission", "region"),
    "InvalidParameterValue": ("configuration", "offer"),
}


class NotOurs(PermanentError):
    """An instance without the caller's installation tag, which must not be touched."""


@dataclass(slots=True, kw_only=True)
class RefusalRule:
    """Refuses launches of offers whose key matches: a number of times, until an instant, or both."""

    pattern: str  # of `type/zone/capacity type`, with * and ?
    code: str
    left_count: int | None
    until: datetime | None
    retry_after_seconds: float = RETRY_AFTER_SECONDS
    passed_count: int = 0  # instances that are still launched before

    def hits(self, offer: Offer, now: datetime) -> bool:
        is_over = (self.until is not None and now >= self.until) or self.left_count == 0
        return not is_over and fnmatchcase(offer.key, self.pattern)


class Cloud:
    """All machines ever launched, and the rules of launching them."""

    def __init__(self, api: Api, types: Iterable[InstanceType] = INSTANCE_CATALOG, *, seed: int = 0) -> None:
        self._api = api
        self._types = {kind.name: kind for kind in types}
        self._offers = {offer.key: offer for offer in offers_of(self._types.values())}
        self._random = random.Random(seed)  # noqa: S311 - boot times that repeat with the seed, no secrets
        self._agenda: Agenda[Callable[[datetime], None]] = Agenda()
        self._by_token: dict[tuple[str, str], Machine] = {}
        self._by_id: dict[str, Machine] = {}  # in order of launch
        self._by_node: dict[str, Machine] = {}
        self.rules: list[RefusalRule] = []
        self.price_ratios: dict[str, float] = {}  # factor of the usual price by offer pattern; the last match applies
        self.shown_after_seconds = 0.0  # from launch until a machine is listed
        self._agenda.add(api.now(), self._beat)

    # ---- the capacity API

    def offers(self) -> tuple[Offer, ...]:
        return tuple(self._priced(offer) for offer in self._offers.values())

    def price_ratio_of(self, offer_key: str) -> float:
        ratios = [ratio for pattern, ratio in self.price_ratios.items() if fnmatchcase(offer_key, pattern)]
        return ratios[-1] if ratios else 1.0

    def _priced(self, offer: Offer) -> Offer:
        usual = offer.price_micro_usd_per_hour
        if usual is None or not self.price_ratios:
            return offer
        price = round(usual * self.price_ratio_of(offer.key))
        return msgspec.structs.replace(offer, price_micro_usd_per_hour=price)

    def launch(self, order: Order) -> Instance:
        """Launch the instance, or return the token's. Raises LaunchRefused, PermanentError."""
        launched = self._by_token.get((order.installation, order.action_id))
        if launched is not None:
            if launched.offer.key != order.offer.key:
                raise PermanentError(
                    f"IdempotentParameterMismatch: token {order.action_id} already bought {launched.offer.key}, "
                    f"not {order.offer.key}; use a new token for another purchase"
                )
            return launched.shown()
        self._require_available(order.offer.key, 1)
        return self._make(order)

    def launch_group(self, transaction: str, orders: Sequence[Order]) -> tuple[Instance, ...]:
        """Launch all instances, or return those launched before. Raises LaunchRefused, PermanentError."""
        tokens = [(order.installation, order.action_id) for order in orders]
        launched = [self._by_token[token] for token in tokens if token in self._by_token]
        if launched and len(launched) < len(orders):
            raise PermanentError(
                f"IdempotentParameterMismatch: transaction {transaction} has made {len(launched)} of {len(orders)} "
                "orders; it makes no more"
            )
        if launched:
            return tuple(machine.shown() for machine in launched)
        self._require_available(orders[0].offer.key, len(orders))
        return tuple(self._make(order) for order in orders)

    def _require_available(self, key: str, count: int) -> None:
        """Raise LaunchRefused unless `count` instances of this offer can be launched."""
        now = self._api.now()
        offer = self._offers.get(key)
        if offer is None:
            raise self._refusal("Unsupported", key, RETRY_AFTER_SECONDS)
        for rule in self.rules:
            if not rule.hits(offer, now):
                continue
            if rule.passed_count >= count:
                rule.passed_count -= count
                continue
            if rule.left_count is not None:
                rule.left_count -= 1
            raise self._refusal(rule.code, offer.key, rule.retry_after_seconds)

    def _make(self, order: Order) -> Instance:
        now = self._api.now()
        offer = self._offers[order.offer.key]
        kind = self._types[offer.instance_type]
        priced = self._priced(offer)
        machine = new_machine(order, kind, priced, len(self._by_id), now, self._random.uniform(-1, 1))
        self._by_token[order.installation, order.action_id] = machine
        self._begin(machine, now)
        return machine.shown()

    def join(self, order: Order, *, instance_id: str, launched_at: datetime, provider_id: ProviderId) -> Machine:
        """Add the machine of an instance that another cloud's API launched; it starts to boot."""
        kind = self._types[order.offer.instance_type]
        jitter = self._random.uniform(-1, 1)
        machine = new_machine(order, kind, order.offer, len(self._by_id), launched_at, jitter)
        machine.instance_id, machine.foreign_provider_id = instance_id, provider_id
        self._begin(machine, self._api.now())
        return machine

    def terminate(self, instance_id: str, installation: str) -> Instance | None:
        """Terminate the instance; idempotent. None: it never existed. Raises NotOurs."""
        machine = self._ours(instance_id, installation)
        if machine is None:
            return None
        self._end(machine, NODE_FORGOTTEN_SECONDS)
        return machine.shown()

    def instance(self, instance_id: str, installation: str) -> Instance | None:
        """Return this instance. None: it never existed. Raises NotOurs."""
        machine = self._ours(instance_id, installation)
        return None if machine is None else machine.shown()

    def _ours(self, instance_id: str, installation: str) -> Machine | None:
        machine = self._by_id.get(instance_id)
        if machine is not None and machine.installation != installation:
            raise NotOurs(
                f"instance {instance_id} carries the tag of installation {machine.installation!r}, not "
                f"{installation!r}: it is left untouched"
            )
        return machine

    def instances(self, installation: str) -> Sequence[Instance]:
        """Return this installation's instances, including those terminated within the last hour."""
        now = self._api.now()
        oldest = now - timedelta(seconds=TERMINATED_SHOWN_SECONDS)
        return [
            machine.shown()
            for machine in self._by_id.values()
            if machine.installation == installation
            and machine.launched_at + timedelta(seconds=self.shown_after_seconds) <= now
            and (machine.terminated_at is None or machine.terminated_at >= oldest)
        ]

    # ---- known to the cloud and its admin API only

    @property
    def machines(self) -> tuple[Machine, ...]:
        """All machines ever launched, in order of launch."""
        return tuple(self._by_id.values())

    def machine_of(self, node_name: str) -> Machine | None:
        """Return the machine behind a node, also before it registers and after its end."""
        return self._by_node.get(node_name)

    def refuse(self, rule: RefusalRule) -> None:
        """Refuse such launches from now on. Raises ValueError for an unknown code and at the limit."""
        if rule.code not in REFUSALS:
            raise ValueError(f"code {rule.code!r} is none of {', '.join(sorted(REFUSALS))}")
        now = self._api.now()
        self.rules = [kept for kept in self.rules if kept.left_count != 0 and (kept.until is None or kept.until > now)]
        if len(self.rules) >= REFUSAL_RULES_MAX:
            raise ValueError(f"{REFUSAL_RULES_MAX} refusal rules are set already: clear them first")
        self.rules.append(rule)

    def take_rules(self) -> list[RefusalRule]:
        """Return the rules that stand, and keep none: another cloud's own API refuses in this one's place."""
        taken, self.rules = self.rules, []
        return taken

    def first_busy_spot(self) -> Machine | None:
        """Return the oldest spot machine without a notice whose node has a running pod; None: there is none."""
        candidates = (
            machine
            for machine in self._by_id.values()
            if machine.offer.capacity_type is CapacityType.SPOT and machine.state == "running" and not machine.notice
        )
        return next(
            (
                machine
                for machine in candidates
                if any(phase_of(pod) == "Running" for pod in self._api.pods_on(machine.node_name))
            ),
            None,
        )

    def give_notice(
        self, machine: Machine, kind: NoticeKind = "terminate", seconds: float = NOTICE_SECONDS
    ) -> datetime:
        """Tell the machine that it will be taken in `seconds`; returns the instant. It is taken then."""
        at = (self._api.now() + timedelta(seconds=seconds)).replace(microsecond=0)  # metadata shows whole seconds
        machine.notice = Notice(kind, at)
        self._agenda.add(at, partial(self._reclaim, machine))
        return at

    def withdraw_notice(self, machine: Machine) -> None:
        machine.notice = None

    def recommend_rebalance(self, machine: Machine) -> datetime:
        """Hint that the machine is likelier to be taken; returns the instant of the hint."""
        machine.rebalance_at = self._api.now().replace(microsecond=0)
        return machine.rebalance_at

    def end(self, machine: Machine, *, charged_until: datetime) -> None:
        """End the machine as ordered through another cloud's own API, which says until when it is charged."""
        self._end(machine, NODE_FORGOTTEN_SECONDS)
        machine.terminated_at = charged_until

    def end_unexpectedly(self, machine: Machine) -> None:
        """End the machine from within, without a notice."""
        self._end(machine, LOST_NODE_FORGOTTEN_SECONDS)

    def schedule(self, seconds: float, action: Callable[[], object]) -> None:
        """Run `action` after `seconds` of cluster time."""

        def act(_now: datetime) -> None:
            action()

        self._agenda.add(self._api.now() + timedelta(seconds=seconds), act)

    # ---- the controller

    def on_change(self, change: Change) -> None:
        """Nothing: changes in the cluster do not affect the cloud."""

    def step(self, now: datetime) -> None:
        for action in self._agenda.take_due(now):
            action(now)

    def _begin(self, machine: Machine, now: datetime) -> None:
        self._by_id[machine.instance_id] = machine
        self._by_node[machine.node_name] = machine
        steps = (
            (RUNNING_AT_RATIO, self._run),
            (REGISTERED_AT_RATIO, self._register),
            (READY_AT_RATIO, self._ready),
            (1.0, self._show_gpus),
        )
        for ratio, step in steps:
            self._agenda.add(now + timedelta(seconds=machine.boot_seconds * ratio), partial(step, machine))

    def _run(self, machine: Machine, _now: datetime) -> None:
        if machine.is_alive:
            machine.state = "running"

    def _register(self, machine: Machine, now: datetime) -> None:
        if machine.is_alive:
            machine.is_registered = True
            _register_node(self._api, machine, now)

    def _ready(self, machine: Machine, now: datetime) -> None:
        if machine.is_alive:
            _set_ready(
                self._api, machine, now, status="True", reason="KubeletReady", message="kubelet is posting ready status"
            )

    def _show_gpus(self, machine: Machine, _now: datetime) -> None:
        if machine.is_alive and machine.kind.gpu_count:
            _show_node_gpus(self._api, machine)

    def _beat(self, now: datetime) -> None:
        """Renew the lease of every living node, as kubelets do."""
        for machine in self._by_id.values():
            if machine.is_alive and machine.is_registered:
                _renew_lease(self._api, machine, now)
        self._agenda.add(now + timedelta(seconds=LEASE_RENEW_SECONDS), self._beat)

    def _reclaim(self, machine: Machine, now: datetime) -> None:
        if machine.notice is not None and machine.notice.at <= now:
            self._end(machine, LOST_NODE_FORGOTTEN_SECONDS)

    def _end(self, machine: Machine, forgotten_seconds: float) -> None:
        if not machine.is_alive:
            return
        now = self._api.now()
        machine.state = "terminating"
        _set_ready(self._api, machine, now, status="False", reason="KubeletNotReady", message="node is shutting down")
        self._agenda.add(now + timedelta(seconds=TERMINATION_SECONDS), partial(self._ended, machine, forgotten_seconds))

    def _ended(self, machine: Machine, forgotten_seconds: float, now: datetime) -> None:
        machine.state = "terminated"
        machine.terminated_at = machine.terminated_at or now
        forgotten_at = now + timedelta(seconds=forgotten_seconds)
        self._agenda.add(forgotten_at, lambda _now: _remove_node(self._api, machine))

    @staticmethod
    def _refusal(code: str, key: str, retry_after_seconds: float) -> LaunchRefused:
        return LaunchRefused(
            f"{code}: {key} cannot be launched now; try another offer or wait {retry_after_seconds:g} s",
            code=code,
            kind=REFUSALS[code][0],
            scope=REFUSALS[code][1],
            retry_after_seconds=retry_after_seconds,
        )


# ---- node objects


def _register_node(api: Api, machine: Machine, now: datetime) -> None:
    """Create the node: labels and taints of the order, not ready, no GPUs yet."""
    node: Json = {
        "metadata": {"name": machine.node_name, "labels": _labels(machine)},
        "spec": {
            "providerID": machine.provider_id,
            "taints": [
                {"key": taint.key, "effect": taint.effect, **({"value": taint.value} if taint.value else {})}
                for taint in machine.taints
            ],
        },
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": machine.internal_ip},
                {"type": "Hostname", "address": machine.node_name},
            ],
            "capacity": _amounts(capacity_of(machine.kind)),
            "allocatable": _amounts(machine.offer.resources),
            "nodeInfo": _node_info(machine),
        },
    }
    for name, reason, message in _PRESSURES:
        set_condition(node, now, name, status="False", reason=reason, message=message)
    set_condition(
        node, now, "Ready", status="False", reason="KubeletNotReady", message="container runtime network not ready"
    )
    if api.find(NODES, machine.node_name) is None:
        api.create(NODES, None, node)
    _renew_lease(api, machine, now)


def _show_node_gpus(api: Api, machine: Machine) -> None:
    """Make the GPUs allocatable, as the device plugin does some time after the node is ready."""
    kind = machine.kind
    memory_mib = (kind.gpu_memory_gib or 0) * 1024
    gpus = shown_gpus(kind.gpu_count, kind.gpu_model, memory_mib * 2**20, _labels(machine))

    def change(node: Json) -> None:
        for amounts in (node["status"]["capacity"], node["status"]["allocatable"]):
            amounts.update(gpus)
        node["metadata"].setdefault("labels", {}).update(
            {labels.GPU_PRODUCT: machine.telemetry.product.replace(" ", "-"), GPU_MEMORY_LABEL: str(memory_mib)}
        )

    api.modify(NODES, machine.node_name, change)


def _remove_node(api: Api, machine: Machine) -> None:
    """Delete node and lease of a machine that is gone, as the cloud's node life-cycle controller does."""
    if api.find(NODES, machine.node_name) is not None:
        api.delete(NODES, machine.node_name)
    if api.find(LEASES, f"{LEASE_NAMESPACE}/{machine.node_name}") is not None:
        api.delete(LEASES, f"{LEASE_NAMESPACE}/{machine.node_name}")


def _renew_lease(api: Api, machine: Machine, now: datetime) -> None:
    spec = {"holderIdentity": machine.node_name, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": stamp_micro(now)}
    if api.modify(LEASES, f"{LEASE_NAMESPACE}/{machine.node_name}", lambda lease: lease.update(spec=spec)) is None:
        api.create(LEASES, LEASE_NAMESPACE, {"metadata": {"name": machine.node_name}, "spec": spec})


def _set_ready(api: Api, machine: Machine, now: datetime, **fields: str) -> None:
    api.modify(NODES, machine.node_name, lambda node: set_condition(node, now, "Ready", **fields))


def _labels(machine: Machine) -> dict[str, str]:
    """Return the order's labels, then those of the machine."""
    known = {
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/os": "linux",
        labels.HOSTNAME: machine.node_name,
        labels.INSTANCE_TYPE: machine.offer.instance_type,
        labels.ZONE: machine.offer.zone,
        labels.REGION: machine.region,
        labels.POOL: machine.pool,
        labels.CAPACITY_TYPE: str(machine.offer.capacity_type),
        labels.GPU_MODEL: machine.offer.gpu_model,
        labels.ACTION_ID: machine.action_id,
        labels.INSTALLATION: machine.installation,
    }
    return dict(machine.labels) | {key: value for key, value in known.items() if value}


def _amounts(resources: Resources) -> dict[str, str]:
    """Return the resources that a kubelet reports before any device plugin registers."""
    return {
        "cpu": f"{resources.cpu_milli}m" if resources.cpu_milli % 1000 else str(resources.cpu_milli // 1000),
        "memory": f"{resources.memory_bytes // 1024}Ki",
        "ephemeral-storage": str(resources.ephemeral_storage_bytes),
        "pods": str(resources.pod_count),
    }


def _node_info(machine: Machine) -> dict[str, str]:
    return {
        "architecture": "amd64",
        "bootID": "",
        "containerRuntimeVersion": "containerd://2.1.5",
        "kernelVersion": "6.12.0",
        "kubeProxyVersion": "",
        "kubeletVersion": KUBELET_VERSION,
        "machineID": machine.instance_id,
        "operatingSystem": "linux",
        "osImage": "Simulated Linux",
        "systemUUID": machine.instance_id,
    }
