"""A notice that the cloud shows is read: what nobody reads, nobody answers. Part of the witness.

Looked at where nothing lay between who shows it and who reads it.
"""

from collections.abc import Callable
from datetime import datetime

from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.sim.cloud import Cloud, Machine
from gpu_autoscaler.sim.events import Message
from gpu_autoscaler.sim.workloads import Workloads

PROMISE = "a notice is answered"
# Metadata is read every five seconds, and a node whose notice it is has been listed for a while by then.
READ_SECONDS_MAX = 20.0
KNOWN_SECONDS = 60.0


class Hearing:
    """Knows which notices were read."""

    def __init__(
        self, workloads: Workloads, cloud: Cloud, breaks: Callable[[str, str], None], is_calm_since: Callable[..., bool]
    ) -> None:
        """`is_calm_since`: no fault lay on a notice's path from a minute before that instant until now."""
        self._loop = workloads.loop
        self._cluster = workloads.cluster
        self._breaks = breaks
        self._is_calm_since = is_calm_since
        self._read: dict[ProviderId, set[str]] = {}  # by the cloud's names for it; since the notice that is shown
        cloud.notice_listeners.append(self._shown)

    def read(self, notice: SpotNoticeReceived) -> None:
        """It is on record."""
        self._read.setdefault(notice.provider_id, set()).add(notice.provider_event)

    def deleted(self, message: Message) -> None:
        """Somebody told the queue that he is done with this: then it is on record."""
        machine = message.machine
        stands = message.is_notice and machine.is_ordered and machine.is_alive and machine.notice is not None
        if stands and not self._is_read(machine):
            self._breaks(PROMISE, f"the queue's notice of {machine.node_name} was deleted, and is not on record")

    def _is_read(self, machine: Machine) -> bool:
        return machine.provider_id in self._read

    def _shown(self, machine: Machine) -> None:
        name = "" if machine.notice is None else machine.notice.provider_event
        if name not in self._read.get(machine.provider_id, ()):  # it may be one that was taken back, and stands again
            self._read.pop(machine.provider_id, None)
        self._loop.call_later(READ_SECONDS_MAX, self._see, machine, machine.notice, self._loop.time())

    def _see(self, machine: Machine, notice: object, shown_at: float) -> None:
        node = self._cluster.find(NODES, "", machine.node_name)
        if machine.notice is None or machine.notice is not notice or not machine.is_alive or node is None:
            return  # it was taken back, or has come true
        is_new = self._age_seconds(node.metadata.creation_timestamp) < KNOWN_SECONDS + READ_SECONDS_MAX
        if is_new or not self._is_calm_since(shown_at):
            return
        if not self._is_read(machine):
            self._breaks(
                PROMISE, f"{machine.node_name} has shown a notice for {READ_SECONDS_MAX:g} s, and nobody read it"
            )

    def _age_seconds(self, made_at: datetime | None) -> float:
        return 0.0 if made_at is None else (self._cluster.now() - made_at).total_seconds()
