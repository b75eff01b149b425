"""Long-running services that start, stop and rescale; some are protected from disruption, some request unavailable
GPUs.
"""

import random

from msgspec.structs import replace

from gpu_autoscaler.kube import wire
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.sim.groups import Groups
from gpu_autoscaler.sim.leanings import with_likes
from gpu_autoscaler.sim.storage import Storage
from gpu_autoscaler.sim.timeline import VirtualLoop

FIRST_COUNT_MAX = 3
FIRST_SECONDS_MAX = 1800.0
STARTED_PER_HOUR = 1.2
LASTS_SECONDS = (1200.0, 7200.0)
RESCALED_SECONDS = (300.0, 2400.0)
REPLICAS_COUNT_MAX = 4
GRACE_SECONDS = (5.0, 30.0, 90.0)
UNSOLD_RATIO = 0.06  # of services: no offer matches
_PROTECTED = ({labels.DO_NOT_DISRUPT: "true"}, {labels.SAFE_TO_EVICT: "false"})
_EVICTION_PRIORITIES = ("low", "medium", "high")  # order of eviction when a node is drained
_FREE: dict[str, str] = {}
# CPU and GPUs of a replica. ExtendedResourceToleration adds the toleration of the GPU taint to pods that request GPUs.
_SIZES = (("1", 1), ("1", 1), ("1", 1), ("2", 2), ("1", 0))


class Serving:
    """All services of a run."""

    def __init__(
        self,
        loop: VirtualLoop,
        groups: Groups,
        chance: random.Random,
        company: random.Random,
        *,
        likes: random.Random,
        storage: Storage | None = None,
    ) -> None:
        """`affinity_chance` draws required rules between replicas, `preferences_chance` preferred ones.

        `storage`: where services keep data; None: they keep none.
        """
        self._storage = storage
        self._company = company
        self._likes = likes
        self._loop = loop
        self._groups = groups
        self._chance = chance
        self._standing: set[str] = set()
        self._started_count = 0
        self._is_over = False

    def begin(self) -> None:
        """Start creating services."""
        for _ in range(self._chance.randint(0, FIRST_COUNT_MAX)):
            self._loop.call_later(self._chance.uniform(0.0, FIRST_SECONDS_MAX), self._start)
        self._next()

    def leave(self) -> None:
        """Stop all services."""
        self._is_over = True
        for uid in sorted(self._standing):
            self._stop(uid)

    def _next(self) -> None:
        self._loop.call_later(self._chance.expovariate(STARTED_PER_HOUR / 3600.0), self._come)

    def _come(self) -> None:
        self._start()
        if not self._is_over:
            self._next()

    def _start(self) -> None:
        if self._is_over:
            return
        chance = self._chance
        replicas_count = chance.randint(1, REPLICAS_COUNT_MAX)
        name = f"service-{self._started_count}"
        uid = self._groups.start(
            name,
            with_likes(self._with_rules(self._pod(name), name), name, self._likes),
            replicas_count=replicas_count,
            annotations={
                **(chance.choice(_PROTECTED) if chance.random() < 0.3 else _FREE),
                labels.EVICTION_PRIORITY: chance.choice(_EVICTION_PRIORITIES),
            },
            healthy_count_min=replicas_count - chance.randint(0, 1),
        )
        self._started_count += 1
        self._standing.add(uid)
        self._loop.call_later(chance.uniform(*LASTS_SECONDS), self._stop, uid)
        self._loop.call_later(chance.uniform(*RESCALED_SECONDS), self._rescale, uid)

    def _pod(self, service: str) -> wire.PodSpec:
        cpu, gpus_count = self._chance.choice(_SIZES)
        amounts = {"cpu": cpu, "memory": "2Gi"} | ({GPU_RESOURCE: str(gpus_count)} if gpus_count else {})
        container = wire.Container(name="main", resources=wire.ResourceList(requests=amounts, limits=amounts))
        is_unsold = self._chance.random() < UNSOLD_RATIO
        return wire.PodSpec(
            containers=(container,),
            node_selector={labels.GPU_MODEL: "H100"} if is_unsold else {},
            tolerations=(wire.WireToleration(key=GPU_RESOURCE, operator="Exists"),) if gpus_count else (),
            termination_grace_period_seconds=self._chance.choice(GRACE_SECONDS),
            volumes=() if self._storage is None else self._storage.volumes_for(service),
        )

    def _with_rules(self, pod: wire.PodSpec, name: str) -> wire.PodSpec:
        """Some require one replica per host, some an even spread over zones."""
        selector = wire.LabelSelector(match_labels={"app": name})
        rule = self._company.choice((None, None, None, "apart", "even"))
        if rule == "apart":
            term = wire.PodAffinityTerm(topology_key=labels.HOSTNAME, label_selector=selector)
            return replace(pod, affinity=wire.Affinity(pod_anti_affinity=wire.PodAffinity(required=(term,))))
        if rule == "even":
            even = wire.TopologySpreadConstraint(topology_key=labels.ZONE, label_selector=selector)
            return replace(pod, topology_spread_constraints=(even,))
        return pod

    def _rescale(self, uid: str) -> None:
        if uid in self._standing:
            self._groups.scale(uid, self._chance.randint(1, REPLICAS_COUNT_MAX))
            self._loop.call_later(self._chance.uniform(*RESCALED_SECONDS), self._rescale, uid)

    def _stop(self, uid: str) -> None:
        if uid in self._standing:
            self._standing.remove(uid)
            self._groups.stop(uid)
