"""Invariants of placement: jobs are placed on nodes that accept pods, moved pods fit elsewhere, and a gang has capacity
for all members.

Lenient: only pods known to every process take capacity, and affinity and volumes are ignored. So a violation is
certain.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.ids import ActionId, JobId
from gpu_autoscaler.model.reasons import NodeDrifted, NodeExpired, NodeUnderused
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.sim.binding import FINISHED, accepts, free_room, is_open
from gpu_autoscaler.sim.cloud import Cloud, Machine
from gpu_autoscaler.sim.kubernetes import Entry
from gpu_autoscaler.sim.workloads import Workloads
from gpu_autoscaler.store.protocol import JobRow

SERVED, REMOVAL, GANG = "work is served", "no voluntary removal", "a gang is bought whole"
SAID_LATELY = timedelta(seconds=10)
KNOWN_SECONDS = 60.0  # a state that has lasted this long without faults is known to every process
_MOVED_BY_CHOICE = (NodeDrifted, NodeExpired, NodeUnderused)  # an idle node has no pods to move


class Shelter:
    """Tracks free capacity and orders."""

    def __init__(
        self, workloads: Workloads, cloud: Cloud, jobs: Mapping[JobId, JobRow], breaks: Callable[[str, str], None]
    ) -> None:
        self._workloads = workloads
        self._cluster = workloads.cluster
        self._cloud = cloud
        self._jobs = jobs
        self._breaks = breaks
        self._on_order: dict[ActionId, BuyNode] = {}
        self._open: set[str] = set()  # names of nodes that accept pods
        self._shut_at: dict[str, float] = {}  # by name of former ones: since when the node accepts none or is gone
        cloud.launch_listeners.append(self._launched)
        self._cluster.listen(self._heard)

    def over(self, action_id: ActionId) -> None:
        """The order was refused or released."""
        self._on_order.pop(action_id, None)

    def planned(self, plan: Plan, *, is_calm: bool) -> None:
        """A plan was published. With faults it may use stale data and is only recorded."""
        bought = [one for one in plan.decisions if isinstance(one, BuyNode)]
        self._on_order.update((one.action_id, one) for one in bought)
        now = self._cluster.now()
        self._on_order = {key: one for key, one in self._on_order.items() if now < one.deadline_at}
        if not is_calm:
            return
        for gang in sorted({one.gang for one in bought if one.gang is not None}):
            self._see_gang(JobId(gang.removeprefix("job/")))
        moved = [
            one for one in plan.decisions if isinstance(one, DrainNode) and isinstance(one.reason, _MOVED_BY_CHOICE)
        ]
        if self._workloads.loop.time() - max(self._shut_at.values(), default=0.0) > KNOWN_SECONDS:
            for drain in moved:
                if drain.is_voluntary:
                    self._see_moved(drain, {one.node_name for one in moved})

    # ---- jobs are placed where they can run

    def placed(self, placed: JobPlaced, *, is_calm: bool) -> None:
        """A job was released to these nodes. Repeated facts of old placements are ignored."""
        now = self._workloads.loop.time()
        if not is_calm or self._cluster.now() - placed.placed_at > SAID_LATELY:
            return
        for name in placed.node_names:
            shut_at = self._shut_at.get(name)
            if shut_at is not None and now - shut_at > KNOWN_SECONDS:
                self._breaks(
                    SERVED, f"{placed.job_id} is placed on {name}, which takes nobody for {now - shut_at:.0f} s"
                )
                return

    # ---- moved pods fit elsewhere

    def _see_moved(self, drain: DrainNode, going: set[str]) -> None:
        nodes = [node for node in self._cluster.all(NODES) if is_open(node) and node.metadata.name not in going]
        free = free_room(nodes, self._known_pods())
        for pod in self._known_pods():
            if pod.spec.node_name != drain.node_name:
                continue
            wanted = pod_requests(pod)
            if not any(wanted.fits_in(free[node.metadata.name]) and accepts(pod.spec, node) for node in nodes):
                what = f"{drain.node_name} is drained by choice, and {pod.metadata.name} has no other place"
                self._breaks(REMOVAL, what)
                return

    def _known_pods(self) -> Iterator[wire.Pod]:
        """Yield running pods known to every process that have not been evicted."""
        seen_by = self._cluster.now() - timedelta(seconds=KNOWN_SECONDS)
        for pod in self._cluster.all(PODS):
            since = pod.status.start_time
            is_staying = pod.status.phase not in FINISHED and pod.metadata.deletion_timestamp is None
            if is_staying and since is not None and since <= seen_by:
                yield pod

    def _heard(self, plural: str, entry: Entry) -> None:
        node = entry.object
        if plural != NODES.plural or not isinstance(node, wire.Node):
            return
        name = node.metadata.name
        if not entry.is_deleted and is_open(node):
            self._open.add(name)
            self._shut_at.pop(name, None)
        elif name in self._open:
            self._open.discard(name)
            self._shut_at[name] = self._workloads.loop.time()

    # ---- a gang has capacity for all members

    def _see_gang(self, job_id: JobId) -> None:
        row = self._jobs.get(job_id)
        if row is None or row.spec.member_resources.slices:  # the future MIG layout of a node is not predicted
            return
        wanted = row.spec
        there = sum(
            1
            for pod in self._cluster.all(PODS)
            if pod.metadata.labels.get(labels.JOB_ID) == job_id and pod.spec.node_name is not None
        )
        works = self._workloads.works.values()
        there += sum(len(work.done) for work in works if work.job.metadata.name == job_id)
        places = there + sum(_places(wanted.member_resources, room) for room in self._rooms())
        if places < wanted.gang_count:
            self._breaks(GANG, f"nodes are bought for {job_id}, of {wanted.gang_count} members {places} have a place")

    def _rooms(self) -> Iterator[Resources]:
        """Yield the free capacity of all nodes, and the capacity of all orders."""
        nodes = self._cluster.all(NODES)
        whole = {node.metadata.name: free for node, free in zip(nodes, free_room(nodes, ()).values(), strict=True)}
        for machine in self._cloud.machines:
            if machine.is_alive:
                whole[machine.node_name] = machine.offer.resources
        for pod in self._known_pods():
            if pod.spec.node_name in whole:
                whole[pod.spec.node_name] -= pod_requests(pod)
        yield from whole.values()
        yield from (order.offer.resources for order in self._on_order.values())

    def _launched(self, machine: Machine) -> None:
        self.over(machine.order.action_id)


def _places(member: Resources, room: Resources) -> int:
    count = 0
    while count < 64 and member.fits_in(room):
        room -= member
        count += 1
    return count
