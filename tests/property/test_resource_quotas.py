"""ResourceQuotas while jobs start, end and lose their nodes in any order: no pod of a job that we let start is refused,
and none that comes back after the loss of a node.

The schedule is the real one; quotas are counted here once more, by the pods that exist.
"""

from itertools import count

from hypothesis import Phase, settings
from hypothesis import given as for_all
from hypothesis import strategies as st
from tests.support.stories import EPOCH, MINUTE, T0, Story, TimedFact, job, node, pod, policy, quota, record, synced

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobPreempted
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.resources import GPU_RESOURCE

_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # a failure is a few lines already
NODES_COUNT = 8
NODES: Story = tuple(fact for number in range(NODES_COUNT) for fact in node(f"n{number}"))

submitted = st.tuples(st.just("submit"), st.sampled_from((1, 2, 4)), st.sampled_from((100, 500, 900)))
passed = st.sampled_from((("tick",), ("recreate",))) | st.tuples(st.sampled_from(("end", "lose")), st.integers(0, 20))
# Several jobs at once, then some time.
rounds = st.lists(
    st.tuples(st.lists(submitted, min_size=1, max_size=4), st.lists(passed, max_size=5)), min_size=2, max_size=6
)
steps = rounds.map(lambda told: [step for more, after in told for step in (*more, ("tick",), *after)])


class Namespace:
    """A namespace with a quota, its jobs, and the pods that exist."""

    def __init__(self, hard_gpu_count: int) -> None:
        self.hard_gpu_count, self.at = hard_gpu_count, T0
        self.pods: dict[JobId, int] = {}  # GPUs of the pod of each job that has one
        self.lost: dict[JobId, int] = {}  # GPUs of the pods that the controller has not created again yet
        self._gpus: dict[JobId, int] = {}
        self._attempts: dict[JobId, int] = {}  # of jobs that run
        self._names: dict[JobId, str] = {}  # of their last pods
        self._facts: list[TimedFact] = list(NODES)
        self._numbers = count(1)

    @property
    def state(self) -> ClusterState:
        """The state now, with whole lists and the quota as Kubernetes counts it."""
        used = {f"requests.{GPU_RESOURCE}": sum(self.pods.values())}
        told = [*self._facts, *quota("gpus", dict.fromkeys(used, self.hard_gpu_count), used)]
        return fold(EMPTY_STATE, record([*told, *synced(told, as_of=self.at)]))

    def submit(self, gpus: int, priority: int) -> None:
        """A job with one member."""
        name = JobId(f"job-{next(self._numbers):02d}")
        self._gpus[name] = gpus
        self._facts += job(name, gpus=gpus, priority=priority, at=self.at, namespace="research")

    def tick(self) -> None:
        """A minute passes, and jobs start: their pods are created at once."""
        self.at += MINUTE
        for placed in schedule(self.state, policy(), self.at).placements:
            self._attempts[placed.job_id] = placed.attempt
            self._tell(
                JobPlaced(
                    job_id=placed.job_id, attempt=placed.attempt, node_uids=placed.node_uids,
                    node_names=placed.node_names, placed_at=self.at, retries_used_count=0,
                )
            )  # fmt: skip
            if placed.job_id not in self.pods:
                self.lost.pop(placed.job_id, None)
                self._create(placed.job_id, placed.node_names[0])

    def recreate(self) -> None:
        """The controllers create the pods of lost nodes again."""
        for job_id in self.lost:
            self._create(job_id, f"n{next(self._numbers) % NODES_COUNT}")
        self.lost.clear()

    def end(self, number: int, *, is_lost: bool) -> None:
        """A job with a pod completes, or loses its node."""
        running = sorted(self.pods.keys() & self._attempts.keys())
        if not running:
            return
        job_id = running[number % len(running)]
        attempt = self._attempts.pop(job_id)
        self._tell(
            PodGone(
                epoch=EPOCH, version=100, pod_uid=PodUid(f"uid-{self._names[job_id]}"), namespace="research",
                name=self._names[job_id], node_name=None, job_id=job_id, phase="failed" if is_lost else "succeeded",
            )
        )  # fmt: skip
        gpus = self.pods.pop(job_id)
        if is_lost:
            self.lost[job_id] = gpus
            self._tell(JobPreempted(job_id=job_id, attempt=attempt, cause="gone", preempted_at=self.at))
        else:
            self._tell(JobFinished(job_id=job_id, outcome="completed", finished_at=self.at))

    def _create(self, job_id: JobId, on: str) -> None:
        used, gpus = sum(self.pods.values()), self._gpus[job_id]
        assert used + gpus <= self.hard_gpu_count, f"{job_id} needs {gpus}, {used} of {self.hard_gpu_count} are used"
        self.pods[job_id] = gpus
        name = self._names[job_id] = f"{job_id}-{next(self._numbers)}"
        self._facts += pod(name, on=on, gpus=gpus, job_id=job_id, at=self.at, namespace="research", owner_kind="Job")

    def _tell(self, fact: Fact) -> None:
        self._facts.append(TimedFact(fact, self.at))


@settings(max_examples=150, deadline=None, phases=_PHASES)
@for_all(st.sampled_from((4, 6, 8)), steps)
def test_no_pod_is_refused(hard_gpu_count: int, told: list[tuple[object, ...]]) -> None:
    """Neither of a job that starts, nor of one that lost its node."""
    namespace = Namespace(hard_gpu_count)
    for step in told:
        match step:
            case ("submit", int(gpus), int(priority)):
                namespace.submit(gpus, priority)
            case ("end" | "lose" as what, int(number)):
                namespace.end(number, is_lost=what == "lose")
            case ("recreate",):
                namespace.recreate()
            case _:
                namespace.tick()
