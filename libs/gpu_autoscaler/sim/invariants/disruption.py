"""Invariants of disruption: PodDisruptionBudgets, finalizers, notices, stale data, and retries of jobs."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from operator import itemgetter

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobFinished, JobPreempted
from gpu_autoscaler.events.node import NodeListed, NodeWatched
from gpu_autoscaler.events.pod import PodListed, PodWatched
from gpu_autoscaler.events.scaling import ScalingNodeDrained, ScalingPlanMade
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.kube.protocol import BUDGETS, NODES
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.decisions import DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, JobId, ProviderId
from gpu_autoscaler.model.reasons.drain import SpotReclaim
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.adapters.interruption_queue import QueueMessage
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.cluster.controllers import Workloads, is_ready
from gpu_autoscaler.sim.cluster.objects import Entry
from gpu_autoscaler.sim.invariants import NO_VOLUNTARY_REMOVAL, NOTICES_HANDLED, RETRIES_KEPT
from gpu_autoscaler.sim.virtual_time import VirtualLoop

KNOWN_SECONDS = 60.0  # a budget that has allowed nothing this long without faults is known to every process


class DisruptionBudgetsInvariant:
    """Tracks since when each budget allows no disruption."""

    def __init__(self, workloads: Workloads, cloud: Cloud, report: Callable[[str, str], None]) -> None:
        self._loop: VirtualLoop = workloads.loop
        self._cluster = workloads.cluster
        self._cloud = cloud
        self._report = report
        self._closed_at: dict[str, float] = {}  # by uid of the budget
        self._cluster.listen(self._on_change)

    def _on_change(self, plural: str, entry: Entry) -> None:
        budget = entry.object
        if plural != BUDGETS.plural or not isinstance(budget, core.PodDisruptionBudget):
            return
        if entry.is_deleted or budget.status.disruptions_allowed > 0:
            self._closed_at.pop(budget.metadata.uid, None)
        else:
            self._closed_at.setdefault(budget.metadata.uid, self._loop.time())

    def on_plan(self, plan: Plan, *, is_calm: bool) -> None:
        """A plan was published. With faults it may use stale data."""
        for drain in plan.drains if is_calm else ():
            machine = self._cloud.of_node(drain.node_name)
            if machine is None or not drain.is_voluntary:
                continue
            for pod in self._cloud.pods_on(machine):
                budget_name = (
                    self._blocking_budget(pod) if is_ready(pod) and not pod.metadata.deletion_timestamp else None
                )
                if budget_name is not None:
                    what = f"{machine.node_name} is drained, but budget {budget_name} protects {pod.metadata.name}"
                    self._report(NO_VOLUNTARY_REMOVAL, what)
                    return

    def _blocking_budget(self, pod: core.Pod) -> str | None:
        for budget in self._cluster.all(BUDGETS):
            selector = budget.spec.selector
            is_covering = (
                budget.metadata.namespace == pod.metadata.namespace
                and selector is not None
                and selector.match_labels.items() <= pod.metadata.labels.items()
            )
            closed_at = self._closed_at.get(budget.metadata.uid)
            if is_covering and closed_at is not None and self._loop.time() - closed_at > KNOWN_SECONDS:
                return budget.metadata.name
        return None


# Invariant: a node deleted by hand is drained before its finalizer is removed; otherwise Kubernetes kills its pods.


class FinalizersInvariant:
    """Checks the pods of each removed node object."""

    def __init__(self, workloads: Workloads, cloud: Cloud, report: Callable[[str, str], None]) -> None:
        self._cloud = cloud
        self._report = report
        workloads.cluster.listen(self._on_change)

    def _on_change(self, plural: str, entry: Entry) -> None:
        node = entry.object
        if plural != NODES.plural or not isinstance(node, core.Node) or not entry.is_deleted:
            return
        machine = self._cloud.of_node(node.metadata.name)
        if machine is None or not machine.is_alive or node.metadata.deletion_timestamp is None:
            return  # it had no finalizer, or its pods ended with the machine
        remaining = [
            pod.metadata.name for pod in self._cloud.pods_on(machine) if pod.metadata.deletion_timestamp is None
        ]
        if remaining:
            what = f"{machine.node_name} was deleted by hand, and removed with running pods: {', '.join(remaining)}"
            self._report(NO_VOLUNTARY_REMOVAL, what)


# Invariant: a withdrawn notice empties no node; a drain started only for the notice is canceled. The node may
# be drained later for another cause, so each drain is judged by the cause in its own decision.

WITHDRAWAL_KNOWN_SECONDS = 20.0  # without faults, until the scaler knows: a poll, a tick and a step


class WithdrawnNoticesInvariant:
    """Tracks withdrawn notices and the drains decided for notices."""

    def __init__(
        self, loop: VirtualLoop, cloud: Cloud, report: Callable[[str, str], None], *, calm_since: Callable[..., float]
    ) -> None:
        """`calm_since`: when the last fault ended, in seconds of the loop."""
        self._loop = loop
        self._cloud = cloud
        self._report = report
        self._calm_since = calm_since
        self._withdrawn_at: dict[str, float] = {}  # by node name
        self._for_notices: set[ActionId] = set()  # drains decided because of a notice

    def notice_withdrawn(self, machine: Machine) -> None:
        """The cloud withdrew a notice."""
        self._withdrawn_at[machine.node_name] = self._loop.time()

    def withdrawn_at(self, node_name: str) -> float | None:
        """Return when the node's last notice was withdrawn, in seconds of the loop; None if none was."""
        return self._withdrawn_at.get(node_name)

    def on_plan(self, plan: Plan) -> None:
        """A plan was made."""
        drains = plan.drains
        self._for_notices.update(decision.action_id for decision in drains if isinstance(decision.reason, SpotReclaim))

    def on_drained(self, drained: ScalingNodeDrained) -> None:
        """A node is empty and will be terminated."""
        machine, withdrawn_at = self._cloud.of_node(drained.node_name), self._withdrawn_at.get(drained.node_name)
        if drained.action_id not in self._for_notices or withdrawn_at is None:
            return
        if machine is None or not machine.is_alive or machine.notice is not None or machine.has_broken_gpu:
            return
        if self._loop.time() - max(withdrawn_at, self._calm_since()) > WITHDRAWAL_KNOWN_SECONDS:
            self._report(NOTICES_HANDLED, f"{drained.node_name} was drained for a notice withdrawn long before")


# Invariant: no voluntary removal on stale data. A plan is checked against the latest observation in its own
# cut. Faults excuse nothing, as faults are what makes data stale.


class StaleDataInvariant:
    """Tracks the observation time at each sequence of a stream."""

    def __init__(self, policies: Policies, report: Callable[[str, str], None]) -> None:
        self._policies = policies
        self._report = report
        self._observed: dict[str, list[tuple[int, datetime]]] = {}
        self.streams_lost()

    def streams_lost(self) -> None:
        """The streams restart."""
        self._observed = {PodListed.stream(): [], NodeListed.stream(): []}

    def on_fact(self, recorded: Recorded) -> None:
        """A fact was stored."""
        fact = recorded.fact
        if isinstance(fact, PodListed | NodeListed):
            self._note_observation(recorded, fact.listed_at)
        elif isinstance(fact, PodWatched | NodeWatched):
            self._note_observation(recorded, fact.watched_at)
        elif isinstance(fact, ScalingPlanMade):
            self._check_plan(fact)

    def _note_observation(self, recorded: Recorded, at: datetime) -> None:
        observed = self._observed[recorded.stream]
        observed.append((recorded.sequence, max(at, observed[-1][1]) if observed else at))

    def _check_plan(self, plan_made: ScalingPlanMade) -> None:
        removals = [
            decision
            for decision in plan_made.plan.decisions
            if isinstance(decision, ReleaseInstance) or (isinstance(decision, DrainNode) and decision.is_voluntary)
        ]
        if not removals:
            return
        cut, seconds_max = (
            dict(plan_made.cut.last_sequences),
            self._policies.by_digest[plan_made.policy_digest].watch_age_seconds_max,
        )
        for stream, observed in self._observed.items():
            place = bisect_right(observed, cut.get(stream, 0), key=itemgetter(0))
            seconds = (plan_made.plan.as_of - observed[place - 1][1]).total_seconds() if place else float("inf")
            if seconds > seconds_max:
                what = (
                    f"plan {plan_made.plan_id} decides {removals[0].action_id} on data {seconds:.0f} s old ({stream})"
                )
                self._report(NO_VOLUNTARY_REMOVAL, what)
                return


# Invariant: every notice that the cloud shows is received, unless a fault was active on its path.

# Metadata is polled every five seconds; the node must have been listed for a while.
RECEIVED_SECONDS_MAX = 20.0
NODE_KNOWN_SECONDS = 60.0


class NoticesReceivedInvariant:
    """Tracks which notices were received."""

    def __init__(
        self, workloads: Workloads, cloud: Cloud, report: Callable[[str, str], None], is_calm_since: Callable[..., bool]
    ) -> None:
        """`is_calm_since`: True if no fault was active on a notice's path since a minute before that instant."""
        self._loop = workloads.loop
        self._cluster = workloads.cluster
        self._report = report
        self._is_calm_since = is_calm_since
        self._received: dict[ProviderId, set[str]] = {}  # the cloud's event ids, since the current notice
        cloud.notice_listeners.append(self._on_notice)

    def notice_received(self, notice: SpotNoticeReceived) -> None:
        """The notice was published."""
        self._received.setdefault(notice.provider_id, set()).add(notice.provider_event)

    def message_deleted(self, message: QueueMessage) -> None:
        """A message was deleted from the queue: its notice must have been published."""
        machine = message.machine
        is_active = message.is_notice and machine.is_ordered and machine.is_alive and machine.notice is not None
        if is_active and not self._is_received(machine):
            self._report(NOTICES_HANDLED, f"the queue's notice of {machine.node_name} was deleted, but never published")

    def _is_received(self, machine: Machine) -> bool:
        return machine.provider_id in self._received

    def _on_notice(self, machine: Machine) -> None:
        name = "" if machine.notice is None else machine.notice.provider_event
        if name not in self._received.get(machine.provider_id, ()):  # it may be a withdrawn notice that is shown again
            self._received.pop(machine.provider_id, None)
        self._loop.call_later(RECEIVED_SECONDS_MAX, self._check_received, machine, machine.notice, self._loop.time())

    def _check_received(self, machine: Machine, notice: object, shown_at: float) -> None:
        node = self._cluster.find(NODES, "", machine.node_name)
        if machine.notice is None or machine.notice is not notice or not machine.is_alive or node is None:
            return  # withdrawn or carried out
        is_new = self._age_seconds(node.metadata.creation_timestamp) < NODE_KNOWN_SECONDS + RECEIVED_SECONDS_MAX
        if is_new or not self._is_calm_since(shown_at):
            return
        if not self._is_received(machine):
            self._report(
                NOTICES_HANDLED,
                f"{machine.node_name} has shown a notice for {RECEIVED_SECONDS_MAX:g} s, which was not received",
            )

    def _age_seconds(self, made_at: datetime | None) -> float:
        return 0.0 if made_at is None else (self._cluster.now() - made_at).total_seconds()


class RetriesInvariant:
    """What a process evicts from a machine without a notice or a fault is lost by our own choice: no retry is used up.

    Counted from the true evictions. A loss that follows a fault may be published before its plan is known.
    """

    def __init__(self, policies: Policies, report: Callable[[str, str], None]) -> None:
        self._policies = policies
        self._report = report
        self._chosen: set[str] = set()  # uids of evicted pods
        self._used: Counter[JobId] = Counter()  # losses that use up a retry
        self._is_rebuilt = False

    def streams_lost(self) -> None:
        """The losses before are unknown."""
        self._is_rebuilt = True

    def evicted_by_choice(self, pod: core.Pod) -> None:
        """A process evicts the pod, and nothing forces it to."""
        if pod.metadata.deletion_timestamp is None:
            self._chosen.add(pod.metadata.uid)

    def on_preempted(self, lost: JobPreempted, *, is_calm: bool) -> None:
        """An attempt of a job has ended."""
        is_chosen = lost.pod_uid in self._chosen
        self._used[lost.job_id] += not is_chosen
        if is_calm and is_chosen and not lost.is_own_choice:
            self._report(RETRIES_KEPT, f"attempt {lost.attempt} of {lost.job_id} used one up: {lost.cause}")

    def on_finished(self, finished: JobFinished, *, is_calm: bool) -> None:
        """A job has ended; `lost N attempts` is the end by its retries."""
        if self._is_rebuilt or not is_calm or not finished.message.startswith("lost "):
            return
        retries_count = min(policy.job_retries_count_max for policy in self._policies.by_digest.values())
        if self._used[finished.job_id] <= retries_count:
            used = f"{self._used[finished.job_id]} of {retries_count} retries were used up"
            self._report(RETRIES_KEPT, f"{finished.job_id} has failed, but {used}: {finished.message}")
