"""Invariants of purchases: refused offers are backed off, nothing is bought twice, gangs are bought as a whole.

A plan is checked against the refusals in its own cut, a process against those that it has read. Orders are compared
with the work that is really waiting: each piece of work counts as one node, so only a plan that forgets its orders
exceeds the count.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime

from gpu_autoscaler.core.deferred_groups import DeferredLookup
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.events.scaling import ScalingLaunchRefused, ScalingNodeLaunched, ScalingPlanMade
from gpu_autoscaler.kube.protocol import PODS, PROVISIONING_REQUESTS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, JobId
from gpu_autoscaler.model.reasons.buy import BelowOverride, CapacityBuffer, ReplacesNodes, UnmetDemand
from gpu_autoscaler.model.reasons.defer_limits import GpusLimit, HourlyPriceLimit, NodesLimit, SpendLimit
from gpu_autoscaler.sim.actors.kueue import is_unserved, pods_count
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.cluster.controllers import Workloads, controller_of
from gpu_autoscaler.sim.invariants import GANGS_WHOLE, NOTHING_BOUGHT_TWICE, REFUSALS_RESPECTED
from gpu_autoscaler.store.protocol import JobRow


class RefusedOffersInvariant:
    """Tracks the last refusal and launch of each offer."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._stream = ScalingLaunchRefused.stream()
        self._planned: dict[ActionId, tuple[str, datetime]] = {}  # offer key and time of the plan
        self._launched_at: dict[str, datetime] = {}  # by offer: time of the plan of the latest launch
        self._refused: dict[str, tuple[int, ScalingLaunchRefused]] = {}  # by offer, with the fact's sequence
        self._refused_orders: dict[ActionId, int] = {}  # refused orders, with the fact's sequence

    def streams_lost(self) -> None:
        """The streams restart."""
        self._refused.clear()
        self._refused_orders.clear()

    def launch_requested(self, action_id: ActionId, known_sequence: int) -> None:
        """A process that has read the stream up to this sequence launches the order."""
        if self._refused_orders.get(action_id, known_sequence + 1) <= known_sequence:
            self._report(REFUSALS_RESPECTED, f"{action_id} was refused, but is requested again")

    def on_fact(self, recorded: Recorded) -> None:
        """A fact was stored."""
        fact = recorded.fact
        if isinstance(fact, ScalingPlanMade):
            self._check_plan(fact)
        elif isinstance(fact, ScalingLaunchRefused):
            self._refused_orders[fact.action_id] = recorded.sequence
            if fact.scope == "offer":
                self._refused[fact.offer.key] = (recorded.sequence, fact)
        elif isinstance(fact, ScalingNodeLaunched) and fact.action_id in self._planned:
            key, planned_at = self._planned[fact.action_id]
            self._launched_at[key] = max(planned_at, self._launched_at.get(key, planned_at))

    def _check_plan(self, plan_made: ScalingPlanMade) -> None:
        known_sequence = dict(plan_made.cut.last_sequences).get(self._stream, 0)
        for decision in plan_made.plan.purchases:
            key = decision.offer.key
            self._planned[decision.action_id] = (key, plan_made.plan.as_of)
            sequence, order_ended = self._refused.get(key, (0, None))
            if order_ended is None or sequence > known_sequence or self._is_available_again(order_ended):
                continue
            if plan_made.plan.as_of < order_ended.retry_at:
                until = order_ended.retry_at.isoformat()
                self._report(
                    REFUSALS_RESPECTED, f"plan {plan_made.plan_id} buys {key}, which is in back-off until {until}"
                )

    def _is_available_again(self, order_ended: ScalingLaunchRefused) -> bool:
        """True if an order planned at the same time or later was launched: the offer is available again."""
        key, planned_at = self._planned.get(order_ended.action_id, (order_ended.offer.key, None))
        launched_at = self._launched_at.get(key)
        return launched_at is not None and (planned_at is None or launched_at >= planned_at)


# Invariant: nothing is bought twice for the same work. Orders are compared with the work that is really
# waiting. Each piece of work counts as one node, so only a plan that forgets its orders exceeds the count.

# Bought for replacement, in advance or for an override: the reason states the count. Headroom is known from the policy
# and counted separately.
_NOT_FOR_WAITING_WORK = (ReplacesNodes, CapacityBuffer, BelowOverride)
SLACK_COUNT = 2  # for work that was placed elsewhere at the same instant


class DuplicatePurchasesInvariant:
    """Tracks open orders, and the work that waited meanwhile."""

    def __init__(
        self,
        workloads: Workloads,
        cloud: Cloud,
        policies: Policies,
        jobs: Mapping[JobId, JobRow],
        report: Callable[[str, str], None],
    ) -> None:
        """`jobs`: the accepted jobs in the store."""
        self._workloads = workloads
        self._cloud = cloud
        self._policies = policies
        self._jobs = jobs
        self._report = report
        self._ordered_at: dict[ActionId, float] = {}
        self._headroom_at: dict[ActionId, float] = {}  # for headroom
        self._machines: dict[ActionId, Machine] = {}
        self._waited: dict[
            str, tuple[int, float]
        ] = {}  # by owner: maximum waiting at once, and when it was last seen waiting
        cloud.launch_listeners.append(self._on_launch)

    def on_plan(self, plan: Plan, *, is_calm: bool) -> None:
        """A plan was published. With faults it may use stale data and is only recorded."""
        now = self._workloads.loop.time()
        self._note_waiting(now)
        for decision in plan.decisions:
            if isinstance(decision, BuyNode) and not isinstance(decision.reason, _NOT_FOR_WAITING_WORK):
                self._ordered_at[decision.action_id] = now
            elif isinstance(decision, BuyNode) and _is_for_headroom(decision):
                self._headroom_at[decision.action_id] = now
            elif isinstance(decision, ReleaseInstance):
                self.order_ended(decision.order_action_id)
        self._drop_obsolete(now)
        policy = self._policies.now
        nodes_count_min = max(
            policy.nodes_count_min, *(size.nodes_count_min or 0 for size in policy.scheduled_limits), 0
        )
        wanted_count = sum(count for count, _ in self._waited.values()) + nodes_count_min
        has_bought = bool(plan.purchases)
        if is_calm and has_bought and len(self._ordered_at) > wanted_count + SLACK_COUNT:
            self._report(
                NOTHING_BOUGHT_TWICE, f"{len(self._ordered_at)} nodes are on order for {wanted_count} pieces of work"
            )
        free_count = sum(headroom.free_gpu_count for headroom in policy.headrooms)
        on_order_count = len(self._ordered_at) + len(self._headroom_at)
        if is_calm and self._headroom_at and has_bought and on_order_count > wanted_count + free_count + SLACK_COUNT:
            self._report(
                NOTHING_BOUGHT_TWICE,
                f"{on_order_count} nodes are on order for {wanted_count} pieces of work and {free_count} free GPUs",
            )

    def order_ended(self, action_id: ActionId) -> None:
        """The order was refused or released."""
        self._ordered_at.pop(action_id, None)
        self._headroom_at.pop(action_id, None)

    def _on_launch(self, machine: Machine) -> None:
        self._machines[machine.order.action_id] = machine

    def _drop_obsolete(self, now: float) -> None:
        """Drop orders that are launched, ended or late, and work that has not waited since."""
        boot_seconds = self._policies.now.boot_seconds_max
        for action_id, ordered_at in {**self._ordered_at, **self._headroom_at}.items():
            machine = self._machines.get(action_id)
            is_launched = machine is not None and (
                machine.is_usable or not machine.is_alive or machine.notice is not None
            )
            if is_launched or now - ordered_at >= boot_seconds:
                self.order_ended(action_id)
        self._waited = {key: seen for key, seen in self._waited.items() if now - seen[1] < boot_seconds}

    def _note_waiting(self, now: float) -> None:
        waiting: Counter[str] = Counter()
        pod_counts: Counter[str] = Counter()
        for pod in self._workloads.cluster.all(PODS):
            if pod.metadata.deletion_timestamp is not None or pod.status.phase == "Failed":
                continue
            owner = controller_of(pod) or pod.metadata.uid
            work = self._workloads.works.get(owner)
            key = owner if work is None else work.job.metadata.name
            machine = self._cloud.of_node(pod.spec.node_name)
            is_at_risk = machine is not None and (machine.notice is not None or not machine.is_alive)
            pod_counts[key] += 1
            waiting[key] += pod.spec.node_name is None or is_at_risk
        for job_id, row in self._jobs.items():
            if row.outcome is None:
                waiting[job_id] += max(0, row.spec.member_count - pod_counts[job_id])
        cluster = self._workloads.cluster
        for request in cluster.all(PROVISIONING_REQUESTS) if cluster.has(PROVISIONING_REQUESTS) else ():
            waiting[request.metadata.uid] += pods_count(request) if is_unserved(request) else 0
        for key, count in waiting.items():
            if count:
                self._waited[key] = (max(count, self._waited.get(key, (0, 0.0))[0]), now)


def _is_for_headroom(decision: BuyNode) -> bool:
    """True for a node bought for headroom, whose size the policy states; not for a forecast."""
    reason = decision.reason
    return isinstance(reason, CapacityBuffer) and all(key.startswith("headroom/") for key in reason.demand)


# Invariant: a gang is bought as a whole. No plan buys for some members and defers others for a limit, a gang with a
# zone constraint is placed in one zone, and nothing is bought for elastic members of a gang that a limit defers.

_LIMITS = (HourlyPriceLimit, GpusLimit, SpendLimit, NodesLimit)


class GangsInvariant:
    """Compares plans with the accepted jobs."""

    def __init__(self, jobs: Mapping[JobId, JobRow], cloud: Cloud, report: Callable[[str, str], None]) -> None:
        self._jobs = jobs
        self._cloud = cloud
        self._report = report

    def on_plan(self, plan: Plan) -> None:
        """A plan was published."""
        lookup = DeferredLookup(plan)
        for decision in plan.purchases:
            if isinstance(decision.reason, UnmetDemand):
                for key in decision.reason.demand:
                    if self._is_gang(key) and (tag := _limit(lookup, key)):
                        self._report(GANGS_WHOLE, f"{decision.action_id} is bought for {key}, which {tag} defers")
                    gang = self._gang_of(key)
                    if gang and (tag := _limit(lookup, gang)):
                        self._report(GANGS_WHOLE, f"{decision.action_id} is bought for {key}, but {tag} defers {gang}")

    def on_placed(self, job_placed: JobPlaced) -> None:
        """A job was released to these nodes."""
        row = self._jobs.get(job_placed.job_id)
        if row is None or row.spec.within != labels.ZONE:
            return
        machines = (self._cloud.of_node(name) for name in job_placed.node_names)
        zones = sorted({machine.offer.zone for machine in machines if machine is not None})
        if len(zones) > 1:
            self._report(GANGS_WHOLE, f"{job_placed.job_id} must be in one zone, but is placed in {', '.join(zones)}")

    @staticmethod
    def _gang_of(key: str) -> str:
        """Return `job/<id>` for `member/<id>/<number>`, an elastic member; empty for other keys."""
        kind, _, name = key.partition("/")
        return f"job/{name.rpartition('/')[0]}" if kind == "member" else ""

    def _is_gang(self, key: str) -> bool:
        row = self._jobs.get(JobId(key.removeprefix("job/")))
        return row is not None and row.spec.gang_count > 1


def _limit(lookup: DeferredLookup, subject: str) -> str:
    """Return the tag of the limit for which the plan defers the subject; empty: for none."""
    reasons = (deferral.reason for deferral in lookup.of(subject))
    return next((reason.tag() for reason in reasons if isinstance(reason, _LIMITS)), "")
