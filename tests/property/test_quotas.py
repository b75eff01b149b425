"""Quotas in any order of submissions, starts, ends, borrowing and preemptions: none is exceeded, and borrowing returns.

The jobs are folded as facts and scheduled by the real schedule; the sums are counted here once more.
"""

from collections import Counter
from datetime import datetime, timedelta
from itertools import count

import msgspec
from hypothesis import Phase, example, settings
from hypothesis import given as for_all
from hypothesis import strategies as st
from tests.support.accepted import accepted_plan
from tests.support.stories import MINUTE, T0, Story, TimedFact, job, node, on_sale, pod, policy, record, synced

from gpu_autoscaler.core.draft import Preemption
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.queue_settings import QueuePolicy, queue_of
from gpu_autoscaler.core.queueing.preemption import preemptions
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobPreempted
from gpu_autoscaler.events.pod import PodGone, PodPhase
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.reasons.defer_limits import CohortQuotaReached
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected
from gpu_autoscaler.model.reasons.preempt import QuotaReclaimed

# A failure is not made smaller, which takes minutes: each example is a few lines already.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)

PROJECTS, USERS = ("a", "b", "c"), ("ann", "bob")

projects = st.tuples(
    *(
        st.fixed_dictionaries(
            {
                "name": st.just(name),
                "nominal_gpu_count": st.sampled_from((4, 8, 2, 0)),
                "borrowing_gpu_count_max": st.sampled_from((None, None, 4, 0)),
                "lending_gpu_count_max": st.sampled_from((None, None, 2, 0)),
                "gpu_count_max": st.sampled_from((None, None, 12, 8)),
            }
        )
        for name in PROJECTS
    )
)
quotas = st.fixed_dictionaries(
    {
        "projects": projects,
        "user_default": st.fixed_dictionaries(
            {
                "gpu_count_max": st.sampled_from((None, None, 16, 6)),
                "month_gpu_hours_max": st.sampled_from((None, None, 40, 12)),
            }
        ),
        "strategy": st.sampled_from(("dynamic", "dynamic", "hybrid", "static")),
    }
)
submitted = st.tuples(
    st.just("submit"), st.sampled_from(PROJECTS), st.sampled_from(USERS), st.sampled_from((1, 2, 4)),
    st.sampled_from((100, 500)),
)  # fmt: skip
passed = st.sampled_from((("tick",), ("gone",), ("tick",), ("lose",))) | st.tuples(
    st.sampled_from(("end", "end", "node")), st.integers(0, 30)
)
# Several jobs at once, then some time: what one project asks for first, others ask back.
rounds = st.lists(
    st.tuples(st.lists(submitted, min_size=1, max_size=5), st.lists(passed, max_size=3)), min_size=3, max_size=7
)
steps = rounds.map(lambda told: [step for more, after in told for step in (*more, ("tick",), *after)])


class World:
    """The jobs of a run with their pods, as facts."""

    def __init__(self, rules: ScalingPolicy, nodes_count: int) -> None:
        nodes: Story = tuple(fact for number in range(nodes_count) for fact in node(f"n{number}"))
        self.rules, self.at, self.facts = rules, T0, list[TimedFact]((*nodes, *on_sale()))
        self.spans: dict[JobId, list[list[datetime | None]]] = {}  # placed and ended, of each attempt
        self.preempted_count = 0
        self._numbers, self._versions = count(1), count(10)
        self._folded = self._state = EMPTY_STATE
        self._state_of = (0, T0)  # the count of folded facts, and the instant of the lists

    @property
    def state(self) -> ClusterState:
        """The state now, with whole lists. Only the facts since the last call are folded."""
        if self._state_of != (now := (len(self.facts), self.at)):
            told = record([*self.facts, *synced(self.facts, as_of=self.at)])
            self._folded = fold(self._folded, told[self._state_of[0] : len(self.facts)])
            self._state, self._state_of = fold(self._folded, told[len(self.facts) :]), now
        return self._state

    def submit(self, project: str, user: str, gpus: int, priority: int) -> None:
        """A job that may run for an hour."""
        name = f"job-{next(self._numbers):02d}"
        self.facts += job(
            name, gpus=gpus, project_id=project, submitted_by=user, priority=priority, at=self.at,
            duration_seconds_max=3600.0,
        )  # fmt: skip

    def tick(self) -> None:
        """Six minutes pass; jobs at their time limit end, others are preempted or placed."""
        self.at += 6 * MINUTE
        for job_id, spans in self.spans.items():
            started, ended = spans[-1]
            if ended is None and started is not None and self.at >= started + timedelta(hours=1):
                self.end(job_id)
        state = self.state
        self._check_order(state)
        made = schedule(state, self.rules, self.at)
        for victim in preemptions(state, self.rules, self.at, scheduled=made, barred={}):
            self.preempted_count += 1
            self._check_victim(victim, made.granted)
            self.spans[victim.job_id][-1][1] = self.at
            self._tell(
                JobPreempted(
                    job_id=victim.job_id, attempt=victim.attempt, cause="", preempted_at=self.at,
                    preemption=victim.reason, is_own_choice=True, retries_used_count=0,
                )
            )  # fmt: skip
        for placed in made.placements:
            is_known = placed.job_id in self.spans and self.spans[placed.job_id][-1][1] is None
            record = state.jobs[placed.job_id].queued
            assert record is not None
            self._tell(
                JobPlaced(
                    job_id=placed.job_id, attempt=placed.attempt, node_uids=placed.node_uids,
                    node_names=placed.node_names, placed_at=self.at, retries_used_count=0,
                )
            )  # fmt: skip
            if not is_known:
                self.spans.setdefault(placed.job_id, []).append([self.at, None])
            elif any(known.job_id == placed.job_id for known in state.pods.values()):
                continue  # its placement was lost, and it runs
            name = f"{placed.job_id}-{placed.attempt}"
            gpus = record.spec.member_resources.gpu_count
            self.facts += pod(name, on=placed.node_names[0], gpus=gpus, job_id=placed.job_id, at=self.at)
        self.check()

    def end(self, job_id: JobId) -> None:
        """The running job completes."""
        self.spans[job_id][-1][1] = self.at
        self._tell(JobFinished(job_id=job_id, outcome="completed", finished_at=self.at))
        self._remove_pods(job_id, phase="succeeded")

    def end_any(self, number: int) -> None:
        """One of the running jobs completes."""
        running = [job_id for job_id, spans in self.spans.items() if spans[-1][1] is None]
        if running:
            self.end(running[number % len(running)])

    def lose_node(self, number: int) -> None:
        """One of the running jobs loses its node. Its Job is not suspended, so it keeps its quota."""
        running = [job_id for job_id, spans in self.spans.items() if spans[-1][1] is None]
        placed = self.state.jobs[running[number % len(running)]].placed if running else None
        if placed is not None:
            self._tell(JobPreempted(job_id=placed.job_id, attempt=placed.attempt, cause="gone", preempted_at=self.at))
            self._remove_pods(placed.job_id)

    def lose_placements(self) -> None:
        """The last placements are lost with their stream; their pods run."""
        self.facts = [told for told in self.facts if not isinstance(told.fact, JobPlaced) or told.at < self.at]
        self._folded, self._state_of = EMPTY_STATE, (0, T0)

    def remove_pods_of_preempted(self) -> None:
        """The suspended Jobs have no pods any more."""
        for job_id, spans in self.spans.items():
            if spans[-1][1] is not None:
                self._remove_pods(job_id)

    def _remove_pods(self, job_id: JobId, *, phase: PodPhase = "failed") -> None:
        for known in [known for known in self.state.pods.values() if known.job_id == job_id]:
            version = next(self._versions)
            self._tell(
                PodGone(
                    epoch=known.epoch, version=version, pod_uid=PodUid(known.pod_uid), namespace=known.namespace,
                    name=known.name, node_name=known.node_name, job_id=job_id, phase=phase,
                )
            )  # fmt: skip

    def _tell(self, fact: object) -> None:
        self.facts.append(TimedFact(fact, self.at))  # type: ignore[arg-type]

    def used(self, *, is_leaving_counted: bool = True) -> Counter[str]:
        """GPUs by project and user of jobs that run, or that were preempted and whose pods remain."""
        state, used = self.state, Counter[str]()
        with_pods = {known.job_id for known in state.pods.values()} if is_leaving_counted else set()
        for job_id, spans in self.spans.items():
            record = state.jobs[job_id]
            if record.queued is None or record.finished is not None:
                continue
            if spans[-1][1] is None or job_id in with_pods:
                spec = record.queued.spec
                used[spec.project_id] += spec.member_resources.gpu_count
                used[f"user {spec.submitted_by}"] += spec.member_resources.gpu_count
        return used

    # ---- what must hold

    def _check_order(self, state: ClusterState) -> None:
        """The plan check accepts the plan, which buys for no job of a strict queue behind one without capacity."""
        made = accepted_plan(state, self.rules, self.at)
        bought = {key for each in made.purchases for key in getattr(each.reason, "demand", ())}
        held = {each.subject for each in made.deferred if not isinstance(each.reason, CapacityExpected)}
        waiting = [(f"job/{job_id}", job.queued.spec.project_id) for job_id, job in state.jobs.items() if job.queued]
        for queue in self.rules.queues:
            names = sorted(key for key, project in waiting if queue_of(self.rules.queues, project) is queue)
            late = next((number for number, key in enumerate(names) if key in held), len(names))
            assert not queue.is_strict or bought.isdisjoint(names[late:]), (queue.name, names[late:])

    def _check_victim(self, victim: Preemption, granted: frozenset[JobId]) -> None:
        """Its project borrows, and the job it ends for fits into the nominal quota of its own, beside all jobs of its
        project that run or got their quota, whatever they wait for."""
        used, state = self.used(is_leaving_counted=False), self.state
        nominal = {quota.name: quota.nominal_gpu_count or 0 for quota in self.rules.quotas.projects}
        assert isinstance(victim.reason, QuotaReclaimed)
        assert used[victim.reason.project] > nominal[victim.reason.project]
        owner, needs = victim.reason.for_project, state.jobs[victim.reason.for_job].queued
        assert needs is not None
        queued = (job.queued.spec for name, job in state.jobs.items() if name in granted and job.queued is not None)
        used[owner] += sum(spec.member_resources.gpu_count for spec in queued if spec.project_id == owner)
        assert used[owner] + needs.spec.member_resources.gpu_count <= nominal[owner]

    def check(self) -> None:
        """No quota is exceeded by jobs that run, or whose pods remain."""
        used = self.used()
        rules = self.rules.quotas
        for user in USERS:
            most = rules.user_default.gpu_count_max
            assert most is None or used[f"user {user}"] <= most
        lent = lendable = 0
        for quota in rules.projects:
            nominal, mine = quota.nominal_gpu_count or 0, used[quota.name]
            assert quota.gpu_count_max is None or mine <= quota.gpu_count_max
            borrowing = 0 if rules.strategy == "static" else quota.borrowing_gpu_count_max
            assert borrowing is None or mine <= nominal + borrowing
            lending = nominal if quota.lending_gpu_count_max is None else quota.lending_gpu_count_max
            if rules.strategy == "hybrid":
                lending = min(lending, nominal - int(nominal * rules.reserved_ratio))
            lent += max(0, mine - nominal)
            lendable += min(max(0, nominal - mine), lending)
        assert lent <= lendable

    def check_hours(self) -> None:
        """No user has more GPU-hours in the month than the quota."""
        seconds, state = Counter[str](), self.state
        for job_id, spans in self.spans.items():
            record = state.jobs[job_id].queued
            assert record is not None
            for started, ended in spans:
                assert started is not None
                lasted = ((ended or self.at) - started).total_seconds()
                seconds[record.spec.submitted_by] += int(lasted) * record.spec.member_resources.gpu_count
        most = self.rules.quotas.user_default.month_gpu_hours_max
        assert most is None or all(total <= most * 3600.0 for total in seconds.values())


def played(
    settings_: dict[str, object],
    told: list[tuple[object, ...]],
    *,
    nodes_count: int = 12,
    queues: tuple[QueuePolicy, ...] = (),
) -> World:
    """The world after these steps; its sums are checked at each tick."""
    for quota in settings_["projects"]:  # type: ignore[attr-defined]
        lending = quota["lending_gpu_count_max"]
        quota["lending_gpu_count_max"] = None if lending is None else min(lending, quota["nominal_gpu_count"])
    world = World(policy(quotas=settings_, queues=queues), nodes_count)
    for step in told:
        match step:
            case ("submit", *fields):
                world.submit(*fields)  # type: ignore[arg-type]
            case ("end", number):
                world.end_any(int(str(number)))
            case ("node", number):
                world.lose_node(int(str(number)))
            case ("gone",):
                world.remove_pods_of_preempted()
            case ("lose",):
                world.lose_placements()
            case _:
                world.tick()
    return world


@settings(max_examples=60, deadline=None, phases=_PHASES)
@for_all(quotas, steps)
def test_no_quota_is_exceeded_in_any_order(settings_: dict[str, object], told: list[tuple[object, ...]]) -> None:
    """GPUs of users, projects and cohorts at each instant, GPU-hours over all."""
    world = played(settings_, told)
    world.tick()

    world.check_hours()


THREE_OF_FOUR: dict[str, object] = {
    "projects": tuple({"name": name, "nominal_gpu_count": 4, "lending_gpu_count_max": 2} for name in PROJECTS)
}
# While the pods of a job of b end, c borrowed what the next job of b needs, and lost a job of its own for it.
ENDS_WHILE_OTHERS_BORROW: list[tuple[object, ...]] = [
    ("submit", "b", "bob", 1, 100), ("submit", "b", "bob", 4, 500), ("submit", "b", "bob", 2, 100),
    ("submit", "c", "bob", 4, 500), ("tick",),
    ("submit", "a", "ann", 4, 500), ("tick",),
    ("submit", "b", "bob", 1, 500), ("submit", "b", "ann", 1, 500), ("submit", "b", "bob", 1, 500), ("end", 8),
    ("tick",), ("end", 4),
    ("submit", "c", "bob", 1, 100), ("tick",),
]  # fmt: skip


STRICT = (QueuePolicy(name="a", projects=("a",)), QueuePolicy(name="all", scheduling_policy="fcfs-strict"))
EIGHT_EACH: dict[str, object] = {
    "projects": tuple({"name": name, "nominal_gpu_count": 8, "lending_gpu_count_max": None} for name in ("a", "b"))
}
# Project a has 12 of 16 GPUs; the first job of b fits on no node, and the one behind it was granted its quota.
WAITS_BEHIND_A_LARGE_JOB: list[tuple[object, ...]] = [
    ("submit", "a", "ann", 3, 500), ("submit", "a", "ann", 3, 500), ("submit", "a", "ann", 3, 500),
    ("submit", "a", "ann", 3, 500), ("tick",),
    ("submit", "b", "bob", 3, 500), ("submit", "b", "bob", 1, 500), ("submit", "b", "bob", 5, 500), ("tick",),
]  # fmt: skip


@settings(max_examples=60, deadline=None, phases=_PHASES)
@for_all(quotas, steps)
@example(THREE_OF_FOUR, ENDS_WHILE_OTHERS_BORROW)
def test_borrowed_quota_returns_to_its_owner(settings_: dict[str, object], told: list[tuple[object, ...]]) -> None:
    """Without any further end by itself, nobody waits for nominal quota of its project that others borrow."""
    world = played(settings_, told)
    for _ in range(8):
        world.tick()
        world.remove_pods_of_preempted()
    made = schedule(world.state, world.rules, world.at)

    for held in made.deferred:
        reason = held.reason
        if isinstance(reason, CohortQuotaReached):
            assert reason.used_gpu_count + reason.needed_gpu_count > reason.nominal_gpu_count, msgspec.to_builtins(held)


@settings(max_examples=60, deadline=None, phases=_PHASES)
@for_all(quotas, steps, st.sampled_from((1, 2)))
@example(EIGHT_EACH, WAITS_BEHIND_A_LARGE_JOB, 2)
def test_nobody_ends_for_a_job_that_would_borrow(
    settings_: dict[str, object], told: list[tuple[object, ...]], nodes_count: int
) -> None:
    """Where jobs wait behind others that lack capacity, what they were granted counts for reclaiming too."""
    played(settings_, told, nodes_count=nodes_count, queues=STRICT)


@settings(max_examples=60, deadline=None, phases=_PHASES)
@for_all(quotas, steps)
def test_nobody_is_preempted_where_quota_is_never_reclaimed(
    settings_: dict[str, object], told: list[tuple[object, ...]]
) -> None:
    """Without reclaiming and priority preemption nothing ends; static allocation needs neither."""
    assert played({**settings_, "is_reclaim_on": False}, told).preempted_count == 0
    assert played({**settings_, "strategy": "static"}, told).preempted_count == 0
