"""Invariant: every notice that the cloud shows is received, unless a fault was active on its path."""

from collections.abc import Callable
from datetime import datetime

from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.sim.cloud import Cloud, Machine
from gpu_autoscaler.sim.events import Message
from gpu_autoscaler.sim.workloads import Workloads

NOTICE_ANSWERED = "a notice is answered"
# Metadata is polled every five seconds; the node must have been listed for a while.
READ_SECONDS_MAX = 20.0
NODE_KNOWN_SECONDS = 60.0


class Hearing:
    """Tracks which notices were received."""

    def __init__(
        self, workloads: Workloads, cloud: Cloud, breaks: Callable[[str, str], None], is_calm_since: Callable[..., bool]
    ) -> None:
        """`is_calm_since`: True if no fault was active on a notice's path from a minute before that instant until now."""
        self._loop = workloads.loop
        self._cluster = workloads.cluster
        self._breaks = breaks
        self._is_calm_since = is_calm_since
        self._read: dict[ProviderId, set[str]] = {}  # the cloud's event ids, since the current notice
        cloud.notice_listeners.append(self._shown)

    def read(self, notice: SpotNoticeReceived) -> None:
        """The notice was published."""
        self._read.setdefault(notice.provider_id, set()).add(notice.provider_event)

    def deleted(self, message: Message) -> None:
        """A message was deleted from the queue: its notice must have been published."""
        machine = message.machine
        stands = message.is_notice and machine.is_ordered and machine.is_alive and machine.notice is not None
        if stands and not self._is_read(machine):
            self._breaks(NOTICE_ANSWERED, f"the queue's notice of {machine.node_name} was deleted, and is not on record")

    def _is_read(self, machine: Machine) -> bool:
        return machine.provider_id in self._read

    def _shown(self, machine: Machine) -> None:
        name = "" if machine.notice is None else machine.notice.provider_event
        if name not in self._read.get(machine.provider_id, ()):  # it may be a withdrawn notice that is shown again
            self._read.pop(machine.provider_id, None)
        self._loop.call_later(READ_SECONDS_MAX, self._see, machine, machine.notice, self._loop.time())

    def _see(self, machine: Machine, notice: object, shown_at: float) -> None:
        node = self._cluster.find(NODES, "", machine.node_name)
        if machine.notice is None or machine.notice is not notice or not machine.is_alive or node is None:
            return  # withdrawn or carried out
        is_new = self._age_seconds(node.metadata.creation_timestamp) < NODE_KNOWN_SECONDS + READ_SECONDS_MAX
        if is_new or not self._is_calm_since(shown_at):
            return
        if not self._is_read(machine):
            self._breaks(
                NOTICE_ANSWERED, f"{machine.node_name} has shown a notice for {READ_SECONDS_MAX:g} s, and nobody read it"
            )

    def _age_seconds(self, made_at: datetime | None) -> float:
        return 0.0 if made_at is None else (self._cluster.now() - made_at).total_seconds()
