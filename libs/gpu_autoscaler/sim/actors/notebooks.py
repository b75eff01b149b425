"""Notebooks: Jobs outside of our queue that hold GPUs and use them at times. For runs with `has_notebooks`.

Most are in a namespace that opted in to the end of idle workloads, and some of these may stay idle. The strings that
seed `Random` are part of each seed's meaning.
"""

import math
import random
from dataclasses import dataclass

from msgspec.structs import replace

from gpu_autoscaler.core.placement.measured_use import LEAST_UTILIZED
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.kube.protocol import JOBS, NAMESPACES
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.sim.cluster.controllers import Workloads, controller_of
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.virtual_time import VirtualLoop

OPTED_IN, OTHER = "notebooks", "lab"  # namespaces
OPTED_IN_RATIO = 0.75
KEPT_RATIO = 0.15  # of notebooks: they may stay idle
STARTED_PER_HOUR = 6.0
IDLE_SECONDS, GRACE_SECONDS = 600.0, 300.0  # of the policy
LIFETIME_SECONDS = (3600.0, 9000.0)
BUSY_SECONDS = (300.0, 2400.0)
PAUSE_SECONDS = (300.0, 1200.0)  # of those that are used again


def opts_in_by_label(seed: int) -> bool:
    """Return whether the namespace opts in by its label, not by the policy."""
    return random.Random(f"{seed}/opted in by label").random() < 0.5


def with_notebooks(policy: ScalingPolicy, seed: int) -> ScalingPolicy:
    """Return the policy that ends idle notebooks; half of the policies place by their measured use."""
    namespaces = () if opts_in_by_label(seed) else (OPTED_IN,)
    rules = replace(policy.idle_jobs, namespaces=namespaces, idle_seconds=IDLE_SECONDS, grace_seconds=GRACE_SECONDS)
    is_measured = random.Random(f"{seed}/placement of notebooks").random() < 0.5
    return replace(policy, idle_jobs=rules, placement=LEAST_UTILIZED if is_measured else policy.placement)


def label_namespaces(cluster: Kubernetes) -> None:
    """Create both namespaces, one of which opts in."""
    cluster.serve(NAMESPACES)
    for name, value in ((OPTED_IN, "true"), (OTHER, "false")):
        metadata = cluster.metadata("", name, labels={labels.END_IDLE_WORKLOADS: value})
        cluster.put(NAMESPACES, core.Object(metadata=metadata))


@dataclass(frozen=True, slots=True)
class Use:
    """When a notebook is idle, in seconds of the loop; before and after it uses its GPUs."""

    idle_from: float
    idle_until: float


class Notebooks:
    """All notebooks of a run."""

    def __init__(self, loop: VirtualLoop, workloads: Workloads, rng: random.Random) -> None:
        self._loop, self._workloads, self._rng = loop, workloads, rng
        self.uses: dict[str, Use] = {}  # by uid of the Job; without those that their users ended
        self._started_count = 0
        self._is_over = False
        workloads.is_idle = self.is_idle

    def begin(self) -> None:
        """Start notebooks until `stop`."""
        self._loop.call_later(self._rng.expovariate(STARTED_PER_HOUR / 3600.0), self._start)

    def stop(self) -> None:
        """Their users end all of them."""
        self._is_over = True
        for uid in sorted(self.uses):
            self._end(uid)

    def gpu_use(self, pod: core.Pod) -> Use | None:
        """Return when the pod's notebook is idle; None: it is no notebook."""
        return self.uses.get(controller_of(pod) or "")

    def is_idle(self, pod: core.Pod) -> bool:
        """Return whether the pod leaves its GPUs idle now."""
        use = self.gpu_use(pod)
        return use is not None and use.idle_from <= self._loop.time() < use.idle_until

    def _start(self) -> None:
        if self._is_over:
            return
        rng, now = self._rng, self._loop.time()
        self._started_count += 1
        kept = {labels.IDLE_ALLOWED: "true"} if rng.random() < KEPT_RATIO else {}
        amounts = {"cpu": "1", "memory": "2Gi", GPU_RESOURCE: "1"}
        pod = {
            "containers": [{"name": "main", "resources": {"requests": amounts, "limits": amounts}}],
            "tolerations": [{"key": GPU_RESOURCE, "operator": "Exists"}],
            "terminationGracePeriodSeconds": 5,
        }
        members_count = rng.choice((1, 1, 2))
        job = self._workloads.create_job(
            OPTED_IN if rng.random() < OPTED_IN_RATIO else OTHER,
            {
                "metadata": {"name": f"notebook-{self._started_count}"},
                "spec": {
                    "completions": members_count,
                    "parallelism": members_count,
                    "template": {"metadata": {"annotations": kept}, "spec": pod},
                },
            },
        )
        idle_from = now + rng.choice((0.0, rng.uniform(*BUSY_SECONDS)))
        idle_until = idle_from + rng.choice((math.inf, math.inf, rng.uniform(*PAUSE_SECONDS)))
        self.uses[job.metadata.uid] = Use(idle_from, idle_until)
        self._loop.call_later(rng.uniform(*LIFETIME_SECONDS), self._end, job.metadata.uid)
        self.begin()

    def _end(self, uid: str) -> None:
        work = self._workloads.works.get(uid)
        if work is not None and self._workloads.cluster.current(JOBS, work.job) is not None:
            del self.uses[uid]  # what its user ends needs no decision
            self._workloads.delete_job(work.job)
