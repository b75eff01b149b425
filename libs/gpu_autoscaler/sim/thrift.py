"""Invariant: nothing is bought twice for the same work. Orders are compared with the work that is really waiting.

Each piece of work counts as one node, so only a plan that forgets its orders exceeds the count.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.model.decisions import BuyNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, JobId
from gpu_autoscaler.model.reasons import BelowOverride, ReplacesNodes, CapacityBuffer
from gpu_autoscaler.sim.cloud import Cloud, Machine
from gpu_autoscaler.sim.policies import Policies
from gpu_autoscaler.sim.workloads import Workloads, controller_of
from gpu_autoscaler.store.protocol import JobRow

# Bought for replacement, in advance or for an override: the reason states the count. Headroom is known from the policy
# and counted separately.
_FOR_NOBODY_WHO_WAITS = (ReplacesNodes, CapacityBuffer, BelowOverride)
SLACK_COUNT = 2  # for work that was placed elsewhere at the same instant


class Thrift:
    """Tracks open orders, and the work that waited meanwhile."""

    def __init__(
        self,
        workloads: Workloads,
        cloud: Cloud,
        policies: Policies,
        jobs: Mapping[JobId, JobRow],
        breaks: Callable[[str, str], None],
    ) -> None:
        """`jobs`: the accepted jobs in the store."""
        self._workloads = workloads
        self._cloud = cloud
        self._policies = policies
        self._jobs = jobs
        self._breaks = breaks
        self._ordered_at: dict[ActionId, float] = {}
        self._ahead_at: dict[ActionId, float] = {}  # for headroom
        self._machines: dict[ActionId, Machine] = {}
        self._waited: dict[str, tuple[int, float]] = {}  # by owner: maximum waiting at once, and when it was last seen waiting
        cloud.launch_listeners.append(self._launched)

    def planned(self, plan: Plan, *, is_calm: bool) -> None:
        """A plan was published. With faults it may use stale data and is only recorded."""
        now = self._workloads.loop.time()
        self._look(now)
        for decision in plan.decisions:
            if isinstance(decision, BuyNode) and not isinstance(decision.reason, _FOR_NOBODY_WHO_WAITS):
                self._ordered_at[decision.action_id] = now
            elif isinstance(decision, BuyNode) and _is_for_headroom(decision):
                self._ahead_at[decision.action_id] = now
            elif isinstance(decision, ReleaseInstance):
                self.refused(decision.order_action_id)
        self._forget(now)
        policy = self._policies.now
        nodes_count_min = max(policy.nodes_count_min, *(size.nodes_count_min or 0 for size in policy.scheduled_limits), 0)
        wanted_count = sum(count for count, _ in self._waited.values()) + nodes_count_min
        has_bought = any(isinstance(decision, BuyNode) for decision in plan.decisions)
        if is_calm and has_bought and len(self._ordered_at) > wanted_count + SLACK_COUNT:
            self._breaks(
                "nothing is bought twice",
                f"{len(self._ordered_at)} nodes are on order for {wanted_count} pieces of work, if each had its own",
            )
        free_count = sum(room.free_gpu_count for room in policy.headrooms)
        on_order_count = len(self._ordered_at) + len(self._ahead_at)
        if is_calm and self._ahead_at and has_bought and on_order_count > wanted_count + free_count + SLACK_COUNT:
            self._breaks(
                "nothing is bought twice",
                f"{on_order_count} nodes are on order for {wanted_count} works and {free_count} GPUs of headroom",
            )

    def refused(self, action_id: ActionId) -> None:
        """The order was refused or released."""
        self._ordered_at.pop(action_id, None)
        self._ahead_at.pop(action_id, None)

    def _launched(self, machine: Machine) -> None:
        self._machines[machine.order.action_id] = machine

    def _forget(self, now: float) -> None:
        """Drop orders that are launched, ended or late, and work that has not waited since."""
        boot_seconds = self._policies.now.boot_seconds_max
        for action_id, ordered_at in {**self._ordered_at, **self._ahead_at}.items():
            machine = self._machines.get(action_id)
            has_come = machine is not None and (machine.is_usable or not machine.is_alive or machine.notice is not None)
            if has_come or now - ordered_at >= boot_seconds:
                self.refused(action_id)
        self._waited = {key: seen for key, seen in self._waited.items() if now - seen[1] < boot_seconds}

    def _look(self, now: float) -> None:
        waiting: Counter[str] = Counter()
        there: Counter[str] = Counter()
        for pod in self._workloads.cluster.all(PODS):
            if pod.metadata.deletion_timestamp is not None or pod.status.phase == "Failed":
                continue
            owner = controller_of(pod) or pod.metadata.uid
            work = self._workloads.works.get(owner)
            key = owner if work is None else work.job.metadata.name
            machine = self._cloud.of_node(pod.spec.node_name)
            is_doomed = machine is not None and (machine.notice is not None or not machine.is_alive)
            there[key] += 1
            waiting[key] += pod.spec.node_name is None or is_doomed
        for job_id, row in self._jobs.items():
            if row.outcome is None:
                waiting[job_id] += max(0, row.spec.member_count - there[job_id])
        for key, count in waiting.items():
            if count:
                self._waited[key] = (max(count, self._waited.get(key, (0, 0.0))[0]), now)


def _is_for_headroom(decision: BuyNode) -> bool:
    """True for a node bought for headroom, whose size the policy states; not for a forecast."""
    reason = decision.reason
    return isinstance(reason, CapacityBuffer) and all(key.startswith("headroom/") for key in reason.demand)
