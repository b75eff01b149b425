"""Quiescence: after the faults end the system must come to rest. Checks at rest what holds only then."""

from collections import Counter
from datetime import timedelta
from typing import Protocol

from gpu_autoscaler.core.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.cost import CostBudgetCrossed
from gpu_autoscaler.events.job import JobFinished, JobQueued, JobRejected, JobRequested
from gpu_autoscaler.events.scaling import ScalingNodeOrdered, ScalingPlanMade
from gpu_autoscaler.kube.protocol import JOBS, NODES, PODS
from gpu_autoscaler.model.reasons import HourlyPriceLimit, GpusLimit, SpendLimit, NodesLimit, NoOfferFits
from gpu_autoscaler.model.shape_reasons import NoDomainFits
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.sim.kubernetes import Kubernetes
from gpu_autoscaler.sim.patience import servable
from gpu_autoscaler.sim.policies import Policies
from gpu_autoscaler.sim.record import Record
from gpu_autoscaler.sim.store import Tables
from gpu_autoscaler.sim.timeline import VirtualLoop
from gpu_autoscaler.sim.witness import Witness
from gpu_autoscaler.sim.workloads import Workloads

SETTLED_SECONDS_MAX = 12 * 3600.0
QUIET_SECONDS = 300.0  # at rest this long: delayed facts have arrived
# Deferrals that can last as long as the policy is unchanged.
_OF_LIMITS = (HourlyPriceLimit, GpusLimit, SpendLimit, NodesLimit, NoOfferFits, NoDomainFits)
STANDSTILL_SECONDS = 1800.0  # longer than a boot, a cooldown and a deadline together
RECOMPUTED_PLANS_COUNT = 3
SAID_AGAIN_COUNT = 300  # at most, the latest of each stream
SAID_AGAIN_AGE_MAX = timedelta(hours=1)  # within the life of tombstones, beyond any redelivery
BUDGET_MARKS_RATIO = (0.8, 1.0)


class Run(Protocol):
    """Parts of the run that are judged."""

    loop: VirtualLoop
    record: Record
    tables: Tables
    policies: Policies
    cluster: Kubernetes
    workloads: Workloads
    cloud: Cloud
    witness: Witness


class Settling:
    """Waits for rest, then judges the end state once."""

    def __init__(self, run: Run) -> None:
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
        if self._unrest():
            self._rest_since = None
            if now - self._moved_at > STANDSTILL_SECONDS and (stuck := servable(self._run)):
                self._run.witness.breaks("settling", f"nothing moves any more, and job {stuck[0]} could be served")
                return True
        elif self._rest_since is None:
            self._rest_since = now
        is_quiet = self._rest_since is not None and now - self._rest_since >= QUIET_SECONDS
        return is_quiet or now - self._began_at > SETTLED_SECONDS_MAX

    def judge(self) -> None:
        """Report everything that violates an invariant."""
        for what in self._unrest():
            self._run.witness.breaks("settling", what)
        self._judge_jobs()
        self._judge_answers()
        self._judge_orders()
        self._judge_bill()
        self._judge_plans()
        self._judge_repeats()

    def _unrest(self) -> list[str]:
        run = self._run
        held = self._held_by_the_policy()
        found = [
            f"job {row.spec.job_id} has no final state"
            for row in run.tables.jobs.values()
            if row.outcome is None and row.spec.job_id not in held
        ]
        standing = [machine for machine in run.cloud.machines if machine.state != "terminated"]
        wanted_count = self._wanted_count()
        missing_count = wanted_count - len(standing)
        if missing_count < 0 or (missing_count > 0 and "cluster" not in self._held()):
            names = ", ".join(f"{machine.node_name} ({machine.state})" for machine in standing)
            found.append(f"{len(standing)} machines without work, {wanted_count} are wanted: {names}")
        names_standing = {machine.node_name for machine in standing}
        found += [
            f"node {node.metadata.name} has no machine"
            for node in run.cluster.all(NODES)
            if run.cloud.of_node(node.metadata.name) is not None and node.metadata.name not in names_standing
        ]
        found += [
            f"node {node.metadata.name} is cordoned and nobody drains it"
            for node in run.cluster.all(NODES)
            if node.spec.unschedulable
        ]
        charged = run.tables.charges
        found += [
            f"{machine.provider_id} is not charged to its end"
            for machine in run.cloud.machines
            if machine.terminated_at is not None
            and (machine.provider_id not in charged or charged[machine.provider_id].last.to_at < machine.terminated_at)
        ]
        return found

    def _wanted_count(self) -> int:
        """Return the minimum size of a cluster without work."""
        policy = self._run.policies.now
        return max(policy.nodes_count_min, sum(pool.nodes_count_min for pool in policy.pools))

    def _held_by_the_policy(self) -> set[str]:
        """Return jobs that a limit keeps from ever starting, in a cluster at its minimum size."""
        run = self._run
        standing_count = sum(1 for machine in run.cloud.machines if machine.state != "terminated")
        if standing_count > self._wanted_count():
            return set()
        return {subject.removeprefix("job/") for subject in self._held()}

    def _held(self) -> set[str]:
        """Return the subjects that the last plan defers for a limit; `cluster` is the minimum number of nodes."""
        plans = self._run.record.facts["SCALING"]
        last = next((told.fact for told in reversed(plans) if isinstance(told.fact, ScalingPlanMade)), None)
        deferred = () if last is None else last.plan.deferred
        return {held.subject for held in deferred if isinstance(held.reason, _OF_LIMITS)}

    # ---- no accepted job is lost; each ends in exactly one final state

    def _judge_jobs(self) -> None:
        breaks, run = self._run.witness.breaks, self._run
        ends: dict[str, str] = {}
        queued: set[str] = set()
        answered: set[str] = {letter.recorded.envelope.id for letter in run.record.dead_letters}
        for recorded in run.record.ever("JOB"):
            fact = recorded.fact
            if isinstance(fact, JobQueued):
                queued.add(fact.job_id)
            elif isinstance(fact, JobRejected):
                answered.add(fact.request_id)
        # The first end in each generation of streams counts; after a loss an end may be published again.
        for facts in (*run.record.lost, run.record.facts):
            told = (one.fact for one in reversed(facts["JOB"]) if isinstance(one.fact, JobFinished))
            ends |= {fact.job_id: fact.outcome for fact in told}
        for recorded in run.record.facts["JOB"]:  # requests without a response at a loss were never accepted
            fact, request_id = recorded.fact, recorded.envelope.id
            if isinstance(fact, JobRequested) and request_id not in answered and str(fact.job_id) not in queued:
                breaks("no job is lost", f"request {request_id} was never answered")
        for row in run.tables.jobs.values():
            job_id = row.spec.job_id
            said = ends.get(job_id)
            if job_id not in queued or said != row.outcome:
                breaks("no job is lost", f"job {job_id} is {row.outcome} in the store, {said} on the record")
            if row.outcome == "completed" and job_id not in run.workloads.completed:
                breaks("no job is lost", f"job {job_id} is called completed, and never ran to its end")
        left = [job.metadata.name for job in run.cluster.all(JOBS) if ends.get(job.metadata.name) == "cancelled"]
        if left:
            breaks("no job is lost", f"cancelled, and still in Kubernetes: {', '.join(left)}")

    def _judge_answers(self) -> None:
        """A repeated request of an accepted job is not rejected."""
        run = self._run
        asked: dict[str, JobRequested] = {}
        accepted: dict[str, JobRequested] = {}
        queued: set[str] = set()
        for recorded in run.record.ever("JOB"):
            fact = recorded.fact
            if isinstance(fact, JobRequested):
                asked[recorded.envelope.id] = fact
            elif isinstance(fact, JobQueued) and fact.job_id not in queued:
                queued.add(fact.job_id)
                cause = asked.get(recorded.envelope.causation_id or "")
                if cause is not None:
                    accepted[fact.job_id] = cause
            elif isinstance(fact, JobRejected):
                request = asked.get(fact.request_id)
                if request is not None and request == accepted.get(request.job_id or ""):
                    run.witness.breaks("no job is lost", f"{request.job_id} was accepted, and refused when asked again")

    # ---- no order is forgotten

    def _judge_orders(self) -> None:
        state = self._state()
        launched = Counter(machine.order.action_id for machine in self._run.cloud.machines)
        for recorded in self._run.record.facts["SCALING"]:
            if isinstance(recorded.fact, ScalingNodeOrdered):
                order = state.orders.get(recorded.fact.action_id)
                if order is not None and not (order.launched or order.refused or order.terminated):
                    self._run.witness.breaks("settling", f"order {order.action_id} was placed and forgotten")
        doubles = [action_id for action_id, count in launched.items() if count > 1]
        if doubles:
            self._run.witness.breaks("one launch for one action", f"bought twice: {', '.join(doubles)}")

    # ---- the ledger equals the invoice, to the micro-dollar

    def _judge_bill(self) -> None:
        breaks = self._run.witness.breaks
        charged: Counter[str] = Counter()
        for span in self._run.tables.ledger.values():
            charged[span.provider_id] += span.total_micro_usd
            allocated = sum(share.allocated_micro_usd for share in span.shares)
            used = sum(share.used_micro_usd or 0 for share in span.shares)
            if allocated + span.idle_micro_usd != span.total_micro_usd:
                breaks("the bill", f"shares and idle of {span.provider_id} from {span.from_at} are not its total")
            if used > allocated:
                breaks("the bill", f"more of {span.provider_id} was used than was allocated")
        for machine in self._run.cloud.machines:
            if machine.terminated_at is not None and charged[machine.provider_id] != machine.cost_micro_usd():
                breaks(
                    "the bill",
                    f"{machine.provider_id} cost {machine.cost_micro_usd()}, charged {charged[machine.provider_id]}",
                )

        self._judge_marks()

    def _judge_marks(self) -> None:
        """Each job budget that was crossed was announced."""
        run = self._run
        told = {
            (one.fact.scope_id, one.fact.mark_ratio)
            for one in run.record.ever("COST")
            if isinstance(one.fact, CostBudgetCrossed)
        }
        for job_id, spent in run.tables.spent.items():
            row = run.tables.jobs.get(job_id)
            limit = None if row is None else row.spec.budget_limit_micro_usd
            for mark in BUDGET_MARKS_RATIO if limit else ():
                if spent >= (limit or 0) * mark and (job_id, mark) not in told:
                    what = f"job {job_id} has spent {spent} of {limit}, and nobody was told of {mark:.0%}"
                    run.witness.breaks("the bill", what)

    # ---- every recorded plan can be recomputed

    def _judge_plans(self) -> None:
        for streams in (*self._run.record.lost, self._run.record.facts):
            made = [one.fact for one in streams["SCALING"] if isinstance(one.fact, ScalingPlanMade)]
            step = max(1, len(made) // RECOMPUTED_PLANS_COUNT)
            for fact in made[step - 1 :: step]:
                state = EMPTY_STATE
                for stream, sequence in fact.cut.last_sequences:
                    state = fold(state, streams[stream][:sequence])
                again = plan(state, self._run.policies.by_digest[fact.policy_digest], fact.plan.as_of)
                if again != fact.plan:
                    self._run.witness.breaks("recomputable plans", f"plan {fact.plan_id} comes out otherwise")

    def _judge_repeats(self) -> None:
        """Facts published again change nothing, even in reverse order.

        Older facts may be about objects whose tombstones have expired.
        """
        state = self._state()
        for stream, facts in self._run.record.facts.items():
            last = facts[-SAID_AGAIN_COUNT:]
            again = [one for one in last if last[-1].envelope.time - one.envelope.time < SAID_AGAIN_AGE_MAX]
            if fold(state, reversed(again)) != state:
                self._run.witness.breaks("facts said again", f"the last facts of {stream} make another state")

    def _state(self) -> ClusterState:
        state = EMPTY_STATE
        for facts in self._run.record.facts.values():
            state = fold(state, facts)
        return state
