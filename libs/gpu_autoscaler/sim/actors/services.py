"""Long-running services that start, stop and rescale; some are protected, some request unavailable GPUs."""

import random

from msgspec.structs import replace

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.sim.cluster.replica_sets import ReplicaSets
from gpu_autoscaler.sim.cluster.volumes import VolumeController
from gpu_autoscaler.sim.virtual_time import VirtualLoop
from gpu_autoscaler.simcluster.offers import ZONES

# Preferred rules of replicas: a zone, a GPU model, near each other, far apart, or evenly spread.

_MODELS = ("T4", "A10G", "L4")
_KINDS = (None, None, None, "zone", "model", "near", "far", "even")


def with_preferences(pod: core.PodSpec, name: str, rng: random.Random) -> core.PodSpec:
    """Return the pod spec with the service's preferences; some services have none."""
    kind = rng.choice(_KINDS)
    affinity = pod.affinity or core.Affinity()
    selector = core.LabelSelector(match_labels={"app": name})
    near = (_weighted(core.PodAffinityTerm(topology_key=labels.ZONE, label_selector=selector), rng),)
    match kind:
        case "zone":
            return replace(pod, affinity=replace(affinity, node_affinity=_prefer_two(labels.ZONE, ZONES, rng)))
        case "model":
            return replace(pod, affinity=replace(affinity, node_affinity=_prefer_two(labels.GPU_MODEL, _MODELS, rng)))
        case "near":
            return replace(pod, affinity=replace(affinity, pod_affinity=core.PodAffinity(preferred=near)))
        case "far":
            rules = affinity.pod_anti_affinity or core.PodAffinity()
            return replace(pod, affinity=replace(affinity, pod_anti_affinity=replace(rules, preferred=near)))
        case "even":
            spread = core.TopologySpreadConstraint(
                topology_key=labels.ZONE, label_selector=selector, when_unsatisfiable="ScheduleAnyway"
            )
            return replace(pod, topology_spread_constraints=(*pod.topology_spread_constraints, spread))
        case _:
            return pod


def _prefer_two(key: str, values: tuple[str, ...], rng: random.Random) -> core.NodeAffinity:
    conditions = [core.Requirement(key=key, operator="In", values=(value,)) for value in rng.sample(values, 2)]
    return core.NodeAffinity(
        preferred=tuple(
            core.PreferredTerm(weight=rng.randint(1, 100), preference=core.SelectorTerm(match_expressions=(condition,)))
            for condition in conditions
        )
    )


def _weighted(term: core.PodAffinityTerm, rng: random.Random) -> core.WeightedPodAffinityTerm:
    return core.WeightedPodAffinityTerm(weight=rng.randint(1, 100), pod_affinity_term=term)


FIRST_COUNT_MAX = 3
FIRST_SECONDS_MAX = 1800.0
STARTED_PER_HOUR = 1.2
LIFETIME_SECONDS = (1200.0, 7200.0)
RESCALED_SECONDS = (300.0, 2400.0)
REPLICAS_COUNT_MAX = 4
GRACE_SECONDS = (5.0, 30.0, 90.0)
UNAVAILABLE_RATIO = 0.06  # of services: no offer matches
_PROTECTED = ({labels.DO_NOT_DISRUPT: "true"}, {labels.SAFE_TO_EVICT: "false"})
_EVICTION_PRIORITIES = ("low", "medium", "high")  # order of eviction when a node is drained
_UNPROTECTED: dict[str, str] = {}
# CPU and GPUs of a replica. ExtendedResourceToleration adds the toleration of the GPU taint to pods that request GPUs.
_SIZES = (("1", 1), ("1", 1), ("1", 1), ("2", 2), ("1", 0))


class Services:
    """All services of a run."""

    def __init__(
        self,
        loop: VirtualLoop,
        replica_sets: ReplicaSets,
        rng: random.Random,
        affinity_rng: random.Random,
        *,
        preferences_rng: random.Random,
        storage: VolumeController | None = None,
    ) -> None:
        """`affinity_chance` draws required rules between replicas, `preferences_chance` preferred ones.

        `storage`: where services keep data; None: they keep none.
        """
        self._storage = storage
        self._affinity_rng = affinity_rng
        self._preferences_rng = preferences_rng
        self._loop = loop
        self._replica_sets = replica_sets
        self._rng = rng
        self._running: set[str] = set()
        self._started_count = 0
        self._is_over = False

    def begin(self) -> None:
        for _ in range(self._rng.randint(0, FIRST_COUNT_MAX)):
            self._loop.call_later(self._rng.uniform(0.0, FIRST_SECONDS_MAX), self._start)
        self._schedule_next()

    def stop(self) -> None:
        self._is_over = True
        for uid in sorted(self._running):
            self._stop(uid)

    def _schedule_next(self) -> None:
        self._loop.call_later(self._rng.expovariate(STARTED_PER_HOUR / 3600.0), self._start_and_schedule)

    def _start_and_schedule(self) -> None:
        self._start()
        if not self._is_over:
            self._schedule_next()

    def _start(self) -> None:
        if self._is_over:
            return
        rng = self._rng
        replicas_count = rng.randint(1, REPLICAS_COUNT_MAX)
        name = f"service-{self._started_count}"
        uid = self._replica_sets.start(
            name,
            with_preferences(self._with_rules(self._pod(name), name), name, self._preferences_rng),
            replicas_count=replicas_count,
            annotations={
                **(rng.choice(_PROTECTED) if rng.random() < 0.3 else _UNPROTECTED),
                labels.EVICTION_PRIORITY: rng.choice(_EVICTION_PRIORITIES),
            },
            healthy_count_min=replicas_count - rng.randint(0, 1),
        )
        self._started_count += 1
        self._running.add(uid)
        self._loop.call_later(rng.uniform(*LIFETIME_SECONDS), self._stop, uid)
        self._loop.call_later(rng.uniform(*RESCALED_SECONDS), self._rescale, uid)

    def _pod(self, service: str) -> core.PodSpec:
        cpu, gpus_count = self._rng.choice(_SIZES)
        amounts = {"cpu": cpu, "memory": "2Gi"} | ({GPU_RESOURCE: str(gpus_count)} if gpus_count else {})
        container = core.Container(name="main", resources=core.ResourceList(requests=amounts, limits=amounts))
        is_unavailable = self._rng.random() < UNAVAILABLE_RATIO
        return core.PodSpec(
            containers=(container,),
            node_selector={labels.GPU_MODEL: "H100"} if is_unavailable else {},
            tolerations=(core.WireToleration(key=GPU_RESOURCE, operator="Exists"),) if gpus_count else (),
            termination_grace_period_seconds=self._rng.choice(GRACE_SECONDS),
            volumes=() if self._storage is None else self._storage.volumes_for(service),
        )

    def _with_rules(self, pod: core.PodSpec, name: str) -> core.PodSpec:
        """Some require one replica per host, some an even spread over zones."""
        selector = core.LabelSelector(match_labels={"app": name})
        rule = self._affinity_rng.choice((None, None, None, "apart", "even"))
        if rule == "apart":
            term = core.PodAffinityTerm(topology_key=labels.HOSTNAME, label_selector=selector)
            return replace(pod, affinity=core.Affinity(pod_anti_affinity=core.PodAffinity(required=(term,))))
        if rule == "even":
            spread = core.TopologySpreadConstraint(topology_key=labels.ZONE, label_selector=selector)
            return replace(pod, topology_spread_constraints=(spread,))
        return pod

    def _rescale(self, uid: str) -> None:
        if uid in self._running:
            self._replica_sets.scale(uid, self._rng.randint(1, REPLICAS_COUNT_MAX))
            self._loop.call_later(self._rng.uniform(*RESCALED_SECONDS), self._rescale, uid)

    def _stop(self, uid: str) -> None:
        if uid in self._running:
            self._running.remove(uid)
            self._replica_sets.stop(uid)
