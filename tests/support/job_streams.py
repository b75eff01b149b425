"""Random streams of jobs on nodes that do not change, scheduled as by the scheduler: facts, `fold` and ticks."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from hypothesis import strategies as st
from tests.support.stories import EPOCH, LIST_VERSION, T0, Story, TimedFact, job, node, offer, pod, record, synced

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.schedule import Placement, schedule
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.job import JobFinished, JobPlaced
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.model.ids import PodUid

NODE_GPUS = 4
_OFFER = offer("g4dn.12xlarge", gpus=NODE_GPUS, model="T4", gpu_memory_gib=16, cpu=48, memory_gib=192)
TICK = timedelta(minutes=10)
STARTING = timedelta(seconds=30)  # from placement to the start of the pods


class Submitted(NamedTuple):
    """A job of a stream."""

    job_id: str
    project: str
    priority: int
    gpus: int  # per member
    members: int
    submitted_at: datetime
    limit: timedelta
    runs: timedelta  # at most the limit


@st.composite
def job_streams(draw: st.DrawFn, nodes_count: int) -> tuple[Submitted, ...]:
    """Jobs of three projects over some hours, more than the nodes can run; each fits on the empty nodes."""
    rng = draw(st.randoms(use_true_random=False))
    jobs: list[Submitted] = []
    at = T0
    for number in range(rng.randrange(8, 30)):
        at += rng.choice((0, 0, 1, 2, 6)) * TICK
        gpus = rng.choice((1, 1, 2, NODE_GPUS))
        members = rng.choice((1, 1, 1, nodes_count)) if gpus == NODE_GPUS else 1
        limit = rng.choice((1, 2, 6, 12)) * timedelta(hours=1)
        jobs.append(
            Submitted(
                job_id=f"j{number:02}",
                project=rng.choice("abc"),
                priority=rng.choice((100, 500, 500, 1000)),
                gpus=gpus,
                members=members,
                submitted_at=at,
                limit=limit,
                runs=limit * rng.choice((0.1, 0.5, 1.0)),
            )
        )
    return tuple(jobs)


class Run:
    """The run of one stream: when each job was placed and ended."""

    def __init__(self, jobs: tuple[Submitted, ...], nodes_count: int, policy: ScalingPolicy) -> None:
        """Lists are read once: the policy must allow old ones."""
        self.jobs: Mapping[str, Submitted] = {each.job_id: each for each in jobs}
        self.placed_at: dict[str, datetime] = {}
        self.ended_at: dict[str, datetime] = {}
        self._policy = policy
        self._state: ClusterState = EMPTY_STATE
        self._version = 1
        self._steps: list[tuple[datetime, str, JobPlaced]] = []  # `start` or `stop` of a placement
        nodes = [node(f"n{number}", _OFFER, is_ours=False, at=T0) for number in range(nodes_count)]
        told = tuple(each for story in nodes for each in story)
        self._take((*told, *synced(told, as_of=T0)))

    def run(self, ticks_count_max: int = 3000) -> None:
        """Run until every job has ended. Raises AssertionError if some job never starts."""
        ahead = sorted(self.jobs.values(), key=lambda each: (each.submitted_at, each.job_id))
        at = T0
        for _ in range(ticks_count_max):
            while ahead and ahead[0].submitted_at <= at:
                self._submit(ahead.pop(0))
            self._observe(at)
            for placement in schedule(self._state, self._policy, at).placements:
                self._place(placement, at)
            if len(self.ended_at) == len(self.jobs):
                return
            at += TICK
        raise AssertionError(f"never started: {sorted(self.jobs.keys() - self.placed_at.keys())}")

    def _take(self, story: Story) -> None:
        self._state = fold(self._state, record(story))

    def _submit(self, each: Submitted) -> None:
        limit = each.limit.total_seconds()
        self._take(
            job(
                each.job_id, gpus=each.gpus, members=each.members, priority=each.priority, at=each.submitted_at,
                project_id=each.project, duration_seconds_max=limit,
            )
        )  # fmt: skip

    def _place(self, placement: Placement, at: datetime) -> None:
        fact = JobPlaced(
            job_id=placement.job_id, attempt=placement.attempt, node_uids=placement.node_uids,
            node_names=placement.node_names, placed_at=at,
        )  # fmt: skip
        self._take((TimedFact(fact, at),))
        started_at = at + STARTING
        ended_at = started_at + self.jobs[placement.job_id].runs
        self.placed_at[placement.job_id] = at
        self._steps += [(started_at, "start", fact), (ended_at, "stop", fact)]

    def _observe(self, at: datetime) -> None:
        due = sorted((step for step in self._steps if step[0] <= at), key=lambda step: step[:2])
        self._steps = [step for step in self._steps if step[0] > at]
        for when, kind, placed in due:
            for number, name in enumerate(placed.node_names):
                self._version += 1
                self._take(self._pod(f"{placed.job_id}-{number}", name, placed, when, is_start=kind == "start"))
            if kind == "stop":
                self.ended_at[placed.job_id] = when
                self._take((TimedFact(JobFinished(job_id=placed.job_id, outcome="completed", finished_at=when), when),))

    def _pod(self, name: str, on: str, placed: JobPlaced, at: datetime, *, is_start: bool) -> Story:
        if is_start:
            gpus = self.jobs[placed.job_id].gpus
            version = LIST_VERSION + self._version
            return pod(name, on=on, gpus=gpus, at=at, owner_kind="Job", job_id=placed.job_id, version=version)
        uid = PodUid(f"uid-{name}")
        version = LIST_VERSION + self._version
        gone = PodGone(epoch=EPOCH, version=version, pod_uid=uid, namespace="default", name=name, node_name=on)
        return (TimedFact(gone, at),)
