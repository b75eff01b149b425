"""Invariants of placement: jobs are placed on nodes that accept pods, moved pods fit elsewhere, and a gang has capacity
for all members.

Lenient: only pods known to every process take capacity, and affinity and volumes are ignored. So a violation is
certain.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.ids import ActionId, JobId
from gpu_autoscaler.model.reasons.drain import NodeDrifted, NodeExpired, NodeUnderused
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Entry
from gpu_autoscaler.sim.cluster.scheduler import FINISHED, accepts, free_capacity, is_open
from gpu_autoscaler.sim.invariants import GANGS_WHOLE, NO_VOLUNTARY_REMOVAL, WORK_SERVED
from gpu_autoscaler.store.protocol import JobRow

PLACED_RECENTLY = timedelta(seconds=10)
KNOWN_SECONDS = 60.0  # a state that has lasted this long without faults is known to every process
_MOVED_BY_CHOICE = (NodeDrifted, NodeExpired, NodeUnderused)  # an idle node has no pods to move


class PlacementInvariant:
    """Tracks free capacity and orders."""

    def __init__(
        self, workloads: Workloads, cloud: Cloud, jobs: Mapping[JobId, JobRow], report: Callable[[str, str], None]
    ) -> None:
        self._workloads = workloads
        self._cluster = workloads.cluster
        self._cloud = cloud
        self._jobs = jobs
        self._report = report
        self._on_order: dict[ActionId, BuyNode] = {}
        self._open: set[str] = set()  # names of nodes that accept pods
        self._closed_at: dict[str, float] = {}  # by name of former ones: since when the node accepts none or is gone
        cloud.launch_listeners.append(self._on_launch)
        self._cluster.listen(self._on_change)

    def order_ended(self, action_id: ActionId) -> None:
        """The order was refused or released."""
        self._on_order.pop(action_id, None)

    def on_plan(self, plan: Plan, *, is_calm: bool) -> None:
        """A plan was published. With faults it may use stale data and is only recorded."""
        bought = plan.purchases
        self._on_order.update((decision.action_id, decision) for decision in bought)
        now = self._cluster.now()
        self._on_order = {key: decision for key, decision in self._on_order.items() if now < decision.deadline_at}
        if not is_calm:
            return
        for gang in sorted({decision.gang for decision in bought if decision.gang is not None}):
            self._check_gang(JobId(gang.removeprefix("job/")))
        drains = [decision for decision in plan.drains if isinstance(decision.reason, _MOVED_BY_CHOICE)]
        if self._workloads.loop.time() - max(self._closed_at.values(), default=0.0) > KNOWN_SECONDS:
            for drain in drains:
                if drain.is_voluntary:
                    self._check_moved(drain, {decision.node_name for decision in drains})

    # ---- jobs are placed where they can run

    def on_placed(self, job_placed: JobPlaced, *, is_calm: bool) -> None:
        """A job was released to these nodes. Repeated facts of old placements are ignored."""
        now = self._workloads.loop.time()
        if not is_calm or self._cluster.now() - job_placed.placed_at > PLACED_RECENTLY:
            return
        held = self._nodes_of_members(job_placed.job_id)
        for name in job_placed.node_names:
            closed_at = None if name in held else self._closed_at.get(name)
            if closed_at is not None and now - closed_at > KNOWN_SECONDS:
                self._report(
                    WORK_SERVED,
                    f"{job_placed.job_id} is placed on {name}, which has accepted no pods for {now - closed_at:.0f} s",
                )
                return

    def _nodes_of_members(self, job_id: JobId) -> set[str | None]:
        """Return the nodes of members that run or have completed: a cordoned node keeps these."""
        pods = (pod for pod in self._cluster.all(PODS) if pod.metadata.labels.get(labels.JOB_ID) == job_id)
        return {pod.spec.node_name for pod in pods if pod.status.phase != "Failed"}

    # ---- moved pods fit elsewhere

    def _check_moved(self, drain: DrainNode, draining: set[str]) -> None:
        nodes = [node for node in self._cluster.all(NODES) if is_open(node) and node.metadata.name not in draining]
        free = free_capacity(nodes, self._known_pods())
        for pod in self._known_pods():
            if pod.spec.node_name != drain.node_name:
                continue
            requests = pod_requests(pod)
            if not any(requests.fits_in(free[node.metadata.name]) and accepts(pod.spec, node) for node in nodes):
                what = f"{drain.node_name} is drained voluntarily, but {pod.metadata.name} fits nowhere else"
                self._report(NO_VOLUNTARY_REMOVAL, what)
                return

    def _known_pods(self) -> Iterator[core.Pod]:
        """Yield running pods known to every process that have not been evicted."""
        seen_by = self._cluster.now() - timedelta(seconds=KNOWN_SECONDS)
        for pod in self._cluster.all(PODS):
            since = pod.status.start_time
            is_staying = pod.status.phase not in FINISHED and pod.metadata.deletion_timestamp is None
            if is_staying and since is not None and since <= seen_by:
                yield pod

    def _on_change(self, plural: str, entry: Entry) -> None:
        node = entry.object
        if plural != NODES.plural or not isinstance(node, core.Node):
            return
        name = node.metadata.name
        if not entry.is_deleted and is_open(node):
            self._open.add(name)
            self._closed_at.pop(name, None)
        elif name in self._open:
            self._open.discard(name)
            self._closed_at[name] = self._workloads.loop.time()

    # ---- a gang has capacity for all members

    def _check_gang(self, job_id: JobId) -> None:
        row = self._jobs.get(job_id)
        if row is None or row.spec.member_resources.slices:  # the future MIG layout of a node is not predicted
            return
        spec = row.spec
        placed_count = sum(
            1
            for pod in self._cluster.all(PODS)
            if pod.metadata.labels.get(labels.JOB_ID) == job_id and pod.spec.node_name is not None
        )
        works = self._workloads.works.values()
        placed_count += sum(len(work.done) for work in works if work.job.metadata.name == job_id)
        places = placed_count + sum(fit_count(spec.member_resources, capacity) for capacity in self._free_capacities())
        if places < spec.gang_count:
            self._report(GANGS_WHOLE, f"nodes are bought for {job_id}: only {places} of {spec.gang_count} members fit")

    def _free_capacities(self) -> Iterator[Resources]:
        """Yield the free capacity of all nodes, and the capacity of all orders."""
        nodes = self._cluster.all(NODES)
        capacities = {
            node.metadata.name: free for node, free in zip(nodes, free_capacity(nodes, ()).values(), strict=True)
        }
        for machine in self._cloud.machines:
            if machine.is_alive:
                capacities[machine.node_name] = machine.offer.resources
        for pod in self._known_pods():
            if pod.spec.node_name in capacities:
                capacities[pod.spec.node_name] -= pod_requests(pod)
        yield from capacities.values()
        yield from (order.offer.resources for order in self._on_order.values())

    def _on_launch(self, machine: Machine) -> None:
        self.order_ended(machine.order.action_id)


def fit_count(member: Resources, capacity: Resources) -> int:
    """Return how many members the capacity has room for, up to 64."""
    count = 0
    while count < 64 and member.fits_in(capacity):
        capacity -= member
        count += 1
    return count
