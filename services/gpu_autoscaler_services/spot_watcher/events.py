"""The queue of a cloud's events: each becomes a fact, and is deleted once that fact is on record.

A message stays in the queue until then, and comes again by itself: nothing is remembered here, so nothing is lost with
a restart. What is not understood is left there, out of the way, and told.
"""

from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import structlog

from gpu_autoscaler.cloudmeta.eventbridge import Beside, Ending, Hint, HookWaits, Notices, Unread, read_event
from gpu_autoscaler.cloudmeta.protocol import EventQueue, QueuedEvent, ReclaimNotice
from gpu_autoscaler.core.state import ClusterState, NoticeRecord
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler_services.spot_watcher.notices import MAINTENANCE_AHEAD, is_early, new_notice, rebalance_fact

# An instance is listed within seconds of its start. What is still unknown then is not ours.
OURS_KNOWN = timedelta(seconds=120)
# The scaler lists instances every few seconds and says that one ended; where it does not, the queue's word counts.
END_LISTED = timedelta(seconds=30)
LEFT_SECONDS = 42_000.0

log = structlog.get_logger()


class CloudEvents:
    """Reads one queue on behalf of one installation."""

    def __init__(self, view: StateView, queue: EventQueue, tell_unread: Callable[[], None] = lambda: None) -> None:
        """`tell_unread` is called for each message that is not understood."""
        self._view = view
        self._queue = queue
        self._tell_unread = tell_unread

    async def __aiter__(self) -> AsyncIterator[QueuedEvent]:
        """Yield what the queue gives, without end. Raises TransientError when it cannot be read."""
        while True:
            for event in await self._queue.receive():
                yield event

    async def on_event(self, event: QueuedEvent) -> list[Fact]:
        """Return what it says that is not on record; delete it where all of it is. Raises TransientError."""
        match read_event(event.body):
            case Notices(instance_ids=ids, notice=notice):
                return await self._notices(event, ids, notice)
            case Hint(instance_id=instance_id, noticed_at=noticed_at):
                provider_id = provider_id_of(self._view.state, instance_id)
                if provider_id is None:
                    return await self._unknown(event)
                known_at = self._view.state.rebalance_recommended_at.get(provider_id)
                if known_at is None or known_at < noticed_at:
                    return [rebalance_fact(provider_id, None, noticed_at)]
            case Ending(instance_id=instance_id, notice=notice):
                return await self._ending(event, instance_id, notice)
            case HookWaits() as waits:
                return await self._hook(event, waits)
            case Unread(said=said):
                log.warning("event left in the queue, it is not understood; see the queue's rules", said=said)
                self._tell_unread()
                await self._queue.hide(event, LEFT_SECONDS)
                return []
            case Beside(said=said):
                log.debug("event of no concern", said=said)
        await self._queue.delete(event)
        return []

    async def _notices(self, event: QueuedEvent, ids: tuple[str, ...], notice: ReclaimNotice) -> list[Fact]:
        ours = [found for each in ids if (found := provider_id_of(self._view.state, each)) is not None]
        if not ours:
            return await self._unknown(event)
        if is_early(notice, event.received_at) and notice.reclaim_at is not None:
            due_in = notice.reclaim_at - MAINTENANCE_AHEAD - event.received_at
            await self._queue.hide(event, due_in.total_seconds() + 1.0)
            return []
        news = [self._new(each, notice, event) for each in ours]
        facts: list[Fact] = [fact for found in news for fact in found]
        if not facts:
            await self._queue.delete(event)
        return facts

    async def _ending(self, event: QueuedEvent, instance_id: str, notice: ReclaimNotice) -> list[Fact]:
        """What the scaler's own list shows needs no notice; nor does what it was going to show in a moment."""
        provider_id = provider_id_of(self._view.state, instance_id)
        if provider_id is None:
            return await self._unknown(event)
        listed = self._view.state.instances.get(provider_id)
        has_ended = listed is not None and listed.state in ("terminating", "terminated")
        if not has_ended and event.received_at - event.sent_at < END_LISTED:
            return []
        facts = [] if has_ended else self._new(provider_id, notice, event)
        if not facts:
            await self._queue.delete(event)
        return facts

    async def _hook(self, event: QueuedEvent, waits: HookWaits) -> list[Fact]:
        """The group waits until the node is empty: until then each time that the message comes is a heartbeat."""
        state = self._view.state
        provider_id = provider_id_of(state, waits.instance_id)
        if provider_id is None:
            return await self._unknown(event)
        if _is_empty(state, provider_id, event):
            await self._queue.let_go(waits.group, waits.hook, waits.token)
            await self._queue.delete(event)
            log.info("group told that its instance may end", provider_id=provider_id, group=waits.group)
            return []
        await self._queue.keep_waiting(waits.group, waits.hook, waits.token)
        return self._new(provider_id, waits.notice, event)

    async def _unknown(self, event: QueuedEvent) -> list[Fact]:
        """Not ours, or not listed yet. The rule that feeds the queue matches every instance of the account."""
        if event.received_at - event.sent_at >= OURS_KNOWN:
            await self._queue.delete(event)
        return []

    def _new(self, provider_id: ProviderId, notice: ReclaimNotice, event: QueuedEvent) -> list[Fact]:
        known = _known(self._view.state, provider_id)
        fact = new_notice(provider_id, None, notice, known, event.received_at, way="queue")
        return [] if fact is None else [fact]


def provider_id_of(state: ClusterState, instance_id: str) -> ProviderId | None:
    """Return which of our instances the cloud means by this id, None for one that is not known as ours."""
    ending = f"/{instance_id}"
    for provider_id in state.instances:
        if provider_id.endswith(ending):
            return provider_id
    for node in state.nodes.values():
        if node.action_id is not None and node.provider_id is not None and node.provider_id.endswith(ending):
            return node.provider_id
    return None


def _known(state: ClusterState, provider_id: ProviderId) -> list[NoticeRecord]:
    return [record for record in state.notices.values() if record.notice.provider_id == provider_id]


def _is_empty(state: ClusterState, provider_id: ProviderId, event: QueuedEvent) -> bool:
    """True when no pod is left on it: it was drained, it has ended, or it is no node by a list made since."""
    if any(each.drained is not None and each.drained.provider_id == provider_id for each in state.drains.values()):
        return True
    instance = state.instances.get(provider_id)
    if instance is not None and instance.state == "terminated":
        return True
    if any(node.provider_id == provider_id for node in state.nodes.values()):
        return False
    synced = state.nodes_synced
    return synced is not None and synced.seen_at > event.sent_at
