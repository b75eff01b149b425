"""Nothing is bought twice for the same work: what is on order is held against the work that truly waits.

Every piece of work counts as a node of its own, so that whoever packs well never comes near; whoever forgets what is
on its way does. Part of the witness.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.model.decisions import BuyNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, JobId
from gpu_autoscaler.model.reasons import OverrideWants, ReplacesNodes, WantedAhead
from gpu_autoscaler.sim.cloud import Cloud, Machine
from gpu_autoscaler.sim.policies import Policies
from gpu_autoscaler.sim.workloads import Workloads, controller_of
from gpu_autoscaler.store.protocol import JobRow

# Bought so that others may go, or that somebody may come: their plans say how many of them there are to be. What is to
# be kept free by the policy is known, and counted by itself.
_FOR_NOBODY_WHO_WAITS = (ReplacesNodes, WantedAhead, OverrideWants)
SLACK_COUNT = 2  # bought for work that found another place in the same instant


class Thrift:
    """Knows what is on order, and who has waited while it was."""

    def __init__(
        self,
        workloads: Workloads,
        cloud: Cloud,
        policies: Policies,
        jobs: Mapping[JobId, JobRow],
        breaks: Callable[[str, str], None],
    ) -> None:
        """`jobs`: those that are accepted, as the store has them."""
        self._workloads = workloads
        self._cloud = cloud
        self._policies = policies
        self._jobs = jobs
        self._breaks = breaks
        self._ordered_at: dict[ActionId, float] = {}
        self._ahead_at: dict[ActionId, float] = {}  # for what the policy wants to be free
        self._machines: dict[ActionId, Machine] = {}
        self._waited: dict[str, tuple[int, float]] = {}  # by whose work: how much at once, and when it was seen last
        cloud.launch_listeners.append(self._launched)

    def planned(self, plan: Plan, *, is_calm: bool) -> None:
        """A plan was made. In troubled times it may be made on an old picture, and is only noted."""
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
        nodes_count_min = max(policy.nodes_count_min, *(size.nodes_count_min or 0 for size in policy.sizes), 0)
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
        """The order is none any more: the cloud would not sell, or it was given back."""
        self._ordered_at.pop(action_id, None)
        self._ahead_at.pop(action_id, None)

    def _launched(self, machine: Machine) -> None:
        self._machines[machine.order.action_id] = machine

    def _forget(self, now: float) -> None:
        """What has come, has died or is late is on order no more; who has not waited since then does not count."""
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
    """True for a node of which the policy itself says how much is to be free; a forecast says it by itself."""
    reason = decision.reason
    return isinstance(reason, WantedAhead) and all(key.startswith("headroom/") for key in reason.demand)
