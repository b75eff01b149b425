"""Quiescence: after the faults end the system must come to rest. Checks at rest what holds only then."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from gpu_autoscaler.core.checked_plan import recomputed_plan
from gpu_autoscaler.core.deferred_groups import NO_TRAITS, DeferredLookup, Traits, job_traits, reason_counts, ungrouped
from gpu_autoscaler.core.demand.quotas import last_attempt, requeue_key
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.cost import CostBudgetCrossed
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobFinished, JobQueued, JobRejected, JobRequested
from gpu_autoscaler.events.scaling import ScalingNodeOrdered, ScalingPlanMade
from gpu_autoscaler.kube.protocol import JOBS, NODES, PODS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons.defer import NoDomainFits, NoOfferFits, ResourceQuotaExceeded
from gpu_autoscaler.model.reasons.defer_limits import GpusLimit, HourlyPriceLimit, NodesLimit, SpendLimit
from gpu_autoscaler.model.reasons.defer_waits import QueueHeadWaits
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.adapters.bus import SimBus
from gpu_autoscaler.sim.adapters.store import Tables
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.invariants import (
    LEDGER_EXACT,
    NO_JOB_LOST,
    ONE_LAUNCH,
    PLANS_RECOMPUTABLE,
    QUIESCENCE,
    REPEATS_CHANGE_NOTHING,
    STATE_READABLE,
)
from gpu_autoscaler.sim.invariants.liveness import servable
from gpu_autoscaler.sim.invariants.monitor import InvariantMonitor
from gpu_autoscaler.sim.process_pool import ProcessPool
from gpu_autoscaler.sim.virtual_time import VirtualLoop

QUIESCENCE_SECONDS_MAX = 12 * 3600.0
REST_SECONDS = 300.0  # at rest this long: delayed facts have arrived
# Deferrals that can last as long as the policy is unchanged.
# The head of a strict queue is judged itself.
_LIMIT_REASONS = (HourlyPriceLimit, GpusLimit, SpendLimit, NodesLimit, NoOfferFits, NoDomainFits, QueueHeadWaits)
STUCK_SECONDS = 1800.0  # longer than a boot, a cooldown and a deadline together
RECOMPUTED_PLANS_COUNT = 3
REPEATED_COUNT = 300  # at most, the latest of each stream
REPEATED_AGE_MAX = timedelta(hours=1)  # within the life of tombstones, beyond any redelivery
BUDGET_MARKS_RATIO = (0.8, 1.0)
_SAME_MOMENT = timedelta(seconds=1)


class JudgedRun(Protocol):
    """Parts of the run that are judged."""

    loop: VirtualLoop
    bus: SimBus
    tables: Tables
    policies: Policies
    cluster: Kubernetes
    workloads: Workloads
    cloud: Cloud
    monitor: InvariantMonitor
    process_pool: ProcessPool


class Quiescence:
    """Waits for rest, then judges the end state once."""

    def __init__(self, run: JudgedRun) -> None:
        self._run = run
        self._began_at: float | None = None
        self._rest_since: float | None = None
        self._moved: tuple[int, int] = (0, 0)
        self._moved_at = 0.0

    def is_over(self) -> bool:
        """True once the run is at rest, has had the maximum time, or is stuck."""
        now = self._run.loop.time()
        if self._began_at is None:
            self._began_at = now
        moved = (self._run.cloud.version, len(self._run.cluster.history[PODS.plural]))
        if moved != self._moved:
            self._moved, self._moved_at = moved, now
        if self._open_issues():
            self._rest_since = None
            if now - self._moved_at > STUCK_SECONDS and (stuck := servable(self._run)):
                self._run.monitor.report(QUIESCENCE, f"nothing changes any more, but job {stuck[0]} could be served")
                return True
        elif self._rest_since is None:
            self._rest_since = now
        is_quiet = self._rest_since is not None and now - self._rest_since >= REST_SECONDS
        return is_quiet or now - self._began_at > QUIESCENCE_SECONDS_MAX

    def judge(self) -> None:
        """Report everything that violates an invariant."""
        for what in self._open_issues():
            self._run.monitor.report(QUIESCENCE, what)
        state = self._state()
        self._judge_jobs()
        self._judge_repeated_requests()
        self._judge_orders(state)
        self._judge_bill()
        self._judge_plans()
        self._judge_repeats(state)
        self._judge_readers()

    def _open_issues(self) -> list[str]:
        run = self._run
        limited = self._limited_jobs()
        issues = [
            f"job {row.spec.job_id} has no final state"
            for row in run.tables.jobs.values()
            if row.outcome is None and row.spec.job_id not in limited
        ]
        machines = [machine for machine in run.cloud.machines if machine.state != "terminated"]
        minimum_count = self._minimum_count()
        missing_count = minimum_count - len(machines)
        if missing_count < 0 or (missing_count > 0 and not self._is_limited("cluster")):
            names = ", ".join(f"{machine.node_name} ({machine.state})" for machine in machines)
            issues.append(f"{len(machines)} machines without work, the minimum is {minimum_count}: {names}")
        machine_names = {machine.node_name for machine in machines}
        issues += [
            f"node {node.metadata.name} has no machine"
            for node in run.cluster.all(NODES)
            if run.cloud.of_node(node.metadata.name) is not None and node.metadata.name not in machine_names
        ]
        issues += [
            f"node {node.metadata.name} is cordoned without a drain"
            for node in run.cluster.all(NODES)
            if node.spec.unschedulable
        ]
        issues += [
            f"node {node.metadata.name} has no finalizer"
            for node in run.cluster.all(NODES)
            if node.metadata.name in machine_names
            and node.metadata.deletion_timestamp is None
            and labels.TERMINATION_FINALIZER not in node.metadata.finalizers
        ]
        charged = run.tables.charges
        issues += [
            f"{machine.provider_id} is not charged to its end"
            for machine in run.cloud.machines
            if machine.terminated_at is not None
            and (machine.provider_id not in charged or charged[machine.provider_id].last.to_at < machine.terminated_at)
        ]
        return issues

    def _minimum_count(self) -> int:
        """Return the minimum size of a cluster without work."""
        policy = self._run.policies.now
        return max(policy.nodes_count_min, sum(pool.nodes_count_min for pool in policy.pools))

    def _limited_jobs(self) -> set[str]:
        """Return jobs that a limit keeps from ever starting, in a cluster at its minimum size."""
        run = self._run
        standing_count = sum(1 for machine in run.cloud.machines if machine.state != "terminated")
        if standing_count > self._minimum_count():
            return set()
        specs = [row.spec for row in run.tables.jobs.values() if row.outcome is None]
        return {
            spec.job_id
            for spec in specs
            if self._is_limited(f"job/{spec.job_id}", job_traits(spec, waits_since=spec.requested_at))
            or self._was_requeued(spec.job_id)
        }

    def _was_requeued(self, job_id: JobId) -> bool:
        """Return whether a limit kept the job from starting when it had quota: now another one has its turn."""
        state = self._state()
        job = state.jobs.get(job_id)
        return job is not None and requeue_key(job_id, last_attempt(job)) in state.upkeep

    def _is_limited(self, subject: str, traits: Traits = NO_TRAITS) -> bool:
        """Return whether the last plan defers the subject for a limit; `cluster` is the minimum number of nodes."""
        plans = self._run.bus.facts["SCALING"]
        last = next((recorded.fact for recorded in reversed(plans) if isinstance(recorded.fact, ScalingPlanMade)), None)
        deferred = () if last is None else DeferredLookup(last.plan).of(subject, traits)
        return any(
            isinstance(deferral.reason, _LIMIT_REASONS)
            or (
                isinstance(deferral.reason, ResourceQuotaExceeded)
                and deferral.reason.needed_milli > deferral.reason.hard_milli
            )
            for deferral in deferred
        )

    # ---- no accepted job is lost; each ends in exactly one final state

    def _judge_jobs(self) -> None:
        report, run = self._run.monitor.report, self._run
        ends: dict[str, Recorded] = {}
        queued: set[str] = set()
        answered: set[str] = {letter.recorded.envelope.id for letter in run.bus.dead_letters}
        for recorded in run.bus.all_facts("JOB"):
            fact = recorded.fact
            if isinstance(fact, JobQueued):
                queued.add(fact.job_id)
            elif isinstance(fact, JobRejected):
                answered.add(fact.request_id)
        # The first end in each generation of streams counts; after a loss an end may be published again.
        for facts in (*run.bus.lost, run.bus.facts):
            for recorded in reversed(facts["JOB"]):
                if isinstance(recorded.fact, JobFinished):
                    ends[recorded.fact.job_id] = recorded
        for recorded in run.bus.facts["JOB"]:  # requests without a response at a loss were never accepted
            fact, request_id = recorded.fact, recorded.envelope.id
            if isinstance(fact, JobRequested) and request_id not in answered and str(fact.job_id) not in queued:
                report(NO_JOB_LOST, f"request {request_id} has neither been accepted nor rejected")
        outcomes = {job_id: end.fact.outcome for job_id, end in ends.items() if isinstance(end.fact, JobFinished)}
        for row in run.tables.jobs.values():
            job_id = row.spec.job_id
            published_outcome = outcomes.get(job_id)
            if job_id not in queued or published_outcome != row.outcome:
                report(
                    NO_JOB_LOST, f"job {job_id} is {row.outcome} in the store, but {published_outcome} in the stream"
                )
            if row.outcome == "completed" and job_id not in run.workloads.completed:
                report(NO_JOB_LOST, f"job {job_id} is reported as completed, but did not complete")
        self._judge_cancelled({job_id: ends[job_id] for job_id in ends if outcomes[job_id] == "cancelled"})

    def _judge_cancelled(self, ends: Mapping[str, Recorded]) -> None:
        """The Job of a cancelled job is gone, unless it ended by itself; then its budget is no reason to cancel it."""
        run, late, spent = self._run, [], []
        for job_id, end in ends.items():
            ended_at, published_at = run.workloads.ended_at.get(job_id), end.stored_at or end.envelope.time
            if ended_at is None or ended_at > published_at:
                late.append(job_id)
            elif published_at - ended_at > _SAME_MOMENT and getattr(end.fact, "message", "").startswith("job budget"):
                spent.append(job_id)
        if remaining := sorted({job.metadata.name for job in run.cluster.all(JOBS)}.intersection(late)):
            run.monitor.report(NO_JOB_LOST, f"cancelled, and still in Kubernetes: {', '.join(remaining)}")
        if spent:
            what = f"ended by themselves, and cancelled for their budgets afterwards: {', '.join(sorted(spent))}"
            run.monitor.report(NO_JOB_LOST, what)

    def _judge_repeated_requests(self) -> None:
        """A repeated request of an accepted job is not rejected."""
        run = self._run
        requests: dict[str, JobRequested] = {}
        accepted: dict[str, JobRequested] = {}
        queued: set[str] = set()
        for recorded in run.bus.all_facts("JOB"):
            fact = recorded.fact
            if isinstance(fact, JobRequested):
                requests[recorded.envelope.id] = fact
            elif isinstance(fact, JobQueued) and fact.job_id not in queued:
                queued.add(fact.job_id)
                cause = requests.get(recorded.envelope.causation_id or "")
                if cause is not None:
                    accepted[fact.job_id] = cause
            elif isinstance(fact, JobRejected):
                request = requests.get(fact.request_id)
                if request is not None and request == accepted.get(request.job_id or ""):
                    run.monitor.report(NO_JOB_LOST, f"{request.job_id} was accepted, but rejected when repeated")

    # ---- no order is forgotten

    def _judge_orders(self, state: ClusterState) -> None:
        launched = Counter(machine.order.action_id for machine in self._run.cloud.machines)
        for recorded in self._run.bus.facts["SCALING"]:
            if isinstance(recorded.fact, ScalingNodeOrdered):
                order = state.orders.get(recorded.fact.action_id)
                if order is not None and not (order.launched or order.refused or order.terminated):
                    self._run.monitor.report(QUIESCENCE, f"order {order.action_id} was placed, but never resolved")
        doubles = [action_id for action_id, count in launched.items() if count > 1]
        if doubles:
            self._run.monitor.report(ONE_LAUNCH, f"bought twice: {', '.join(doubles)}")

    # ---- the ledger equals the invoice, to the micro-dollar

    def _judge_bill(self) -> None:
        report = self._run.monitor.report
        charged: Counter[str] = Counter()
        for span in (*self._run.tables.days.values(), *self._run.tables.ledger.values()):
            charged[span.provider_id] += span.total_micro_usd
            allocated = sum(share.allocated_micro_usd for share in span.shares)
            used = sum(share.used_micro_usd or 0 for share in span.shares)
            if allocated + span.idle_micro_usd != span.total_micro_usd:
                report(
                    LEDGER_EXACT,
                    f"shares and idle cost of {span.provider_id} from {span.from_at} do not sum to its total",
                )
            if used > allocated:
                report(LEDGER_EXACT, f"{span.provider_id} has more used than allocated cost")
        for machine in self._run.cloud.machines:
            if machine.terminated_at is not None and charged[machine.provider_id] != machine.cost_micro_usd():
                report(
                    LEDGER_EXACT,
                    f"{machine.provider_id} cost {machine.cost_micro_usd()}, charged {charged[machine.provider_id]}",
                )

        self._judge_budget_marks()

    def _judge_budget_marks(self) -> None:
        """Each job budget that was crossed was announced."""
        run = self._run
        announced = {
            (recorded.fact.scope_id, recorded.fact.mark_ratio)
            for recorded in run.bus.all_facts("COST")
            if isinstance(recorded.fact, CostBudgetCrossed)
        }
        for job_id, spent in run.tables.spent.items():
            row = run.tables.jobs.get(job_id)
            limit = None if row is None else row.spec.budget_limit_micro_usd
            for mark in BUDGET_MARKS_RATIO if limit else ():
                if spent >= (limit or 0) * mark and (job_id, mark) not in announced:
                    what = f"job {job_id} has spent {spent} of {limit}, but {mark:.0%} was not announced"
                    run.monitor.report(LEDGER_EXACT, what)

    # ---- every recorded plan can be recomputed

    def _judge_plans(self) -> None:
        for streams in (*self._run.bus.lost, self._run.bus.facts):
            plans_made = [
                recorded.fact for recorded in streams["SCALING"] if isinstance(recorded.fact, ScalingPlanMade)
            ]
            step = max(1, len(plans_made) // RECOMPUTED_PLANS_COUNT)
            most_deferred = sorted(plans_made, key=lambda fact: sum(reason_counts(fact.plan).values()))[-1:]
            for fact in {fact.plan_id: fact for fact in (*plans_made[step - 1 :: step], *most_deferred)}.values():
                policy = self._run.policies.by_digest[fact.policy_digest]
                state, recomputed = self._recomputed(fact, streams, policy)
                explained = {(deferred.step, deferred.subject) for deferred in ungrouped(fact.plan, state)}
                made = () if fact.plan.rejected else plan(state, policy, fact.plan.as_of).deferred
                lost = [entry.subject for entry in made if (entry.step, entry.subject) not in explained]
                if lost:
                    what = f"plan {fact.plan_id} defers {lost[0]}, which is in none of its groups"
                    self._run.monitor.report(PLANS_RECOMPUTABLE, what)
                if recomputed != fact.plan:
                    self._run.monitor.report(PLANS_RECOMPUTABLE, f"plan {fact.plan_id} differs when recomputed")

    def _recomputed(
        self, fact: ScalingPlanMade, streams: Mapping[str, Sequence[Recorded]], policy: ScalingPolicy
    ) -> tuple[ClusterState, Plan]:
        """Return the state of the plan's cut and the plan made of it: of all facts, or of those that a process could
        read which began after some were discarded. What decides by history knows no more than that."""
        first: tuple[ClusterState, Plan] | None = None
        for read_up_to in ({}, *self._run.bus.skipped):
            state = EMPTY_STATE
            for stream, sequence in fact.cut.last_sequences:
                state = fold(state, streams[stream][read_up_to.get(stream, 0) : sequence])
            made = state, recomputed_plan(fact.plan, state, policy)
            if made[1] == fact.plan:
                return made
            first = first or made
        assert first is not None  # noqa: S101 - all facts are the first choice
        return first

    def _judge_repeats(self, state: ClusterState) -> None:
        """Facts published again change nothing, even in reverse order.

        Older facts may be about objects whose tombstones have expired.
        """
        for stream, facts in self._run.bus.facts.items():
            last = facts[-REPEATED_COUNT:]
            repeated = [
                recorded for recorded in last if last[-1].envelope.time - recorded.envelope.time < REPEATED_AGE_MAX
            ]
            if fold(state, reversed(repeated)) != state:
                self._run.monitor.report(
                    REPEATS_CHANGE_NOTHING, f"repeating the last facts of {stream} changes the state"
                )

    def _judge_readers(self) -> None:
        """Where streams discard, a service that was behind knows what is alive as one that read every fact does."""
        for name, process in self._run.process_pool.processes.items() if self._run.bus.discards else ():
            for difference in process.living_differences():
                self._run.monitor.report(STATE_READABLE, f"{name}: {difference}")

    def _state(self) -> ClusterState:
        return self._run.bus.folded(FACTS)
