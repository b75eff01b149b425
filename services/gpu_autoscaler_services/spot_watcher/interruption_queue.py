"""A cloud's queue of interruption events: each becomes a fact, and is deleted once that fact is in the state.

Until then the queue redelivers the message, so a restart loses nothing.
"""

from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import structlog

from gpu_autoscaler.cloudmeta.eventbridge import (
    Ending,
    Irrelevant,
    LifecycleHook,
    Notices,
    RebalanceRecommendation,
    Unparsed,
    read_event,
)
from gpu_autoscaler.cloudmeta.notices import MAINTENANCE_AHEAD, is_early, new_notice, notices_of, rebalance_fact
from gpu_autoscaler.cloudmeta.protocol import EventQueue, QueuedEvent, ReclaimNotice
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.runtime.projection import StateView

# Our instances are listed within seconds of their start; one unknown after this time is not ours.
OURS_KNOWN = timedelta(seconds=120)
# The scaler normally lists a termination within seconds; after this time the queue's event becomes a notice.
END_LISTED = timedelta(seconds=30)
UNPARSED_HIDE_SECONDS = 42_000.0

log = structlog.get_logger()


class InterruptionQueue:
    """Reads one queue on behalf of one installation."""

    def __init__(self, view: StateView, queue: EventQueue, on_unparsed: Callable[[], None] = lambda: None) -> None:
        """`on_unparsed` is called for each message that cannot be parsed."""
        self._view = view
        self._queue = queue
        self._on_unparsed = on_unparsed

    async def __aiter__(self) -> AsyncIterator[QueuedEvent]:
        """Yield the queue's messages, endlessly. Raises TransientError if it cannot be read."""
        while True:
            for event in await self._queue.receive():
                yield event

    async def on_event(self, event: QueuedEvent) -> list[Fact]:
        """Return the facts of the message that the state lacks; delete it if there are none. Raises TransientError."""
        match read_event(event.body):
            case Notices(instance_ids=ids, notice=notice):
                return await self._notices(event, ids, notice)
            case RebalanceRecommendation(instance_id=instance_id, noticed_at=noticed_at):
                provider_id = provider_id_of(self._view.state, instance_id)
                if provider_id is None:
                    return await self._unknown(event)
                known_at = self._view.state.rebalance_recommended_at.get(provider_id)
                if known_at is None or known_at < noticed_at:
                    return [rebalance_fact(provider_id, None, noticed_at)]
            case Ending(instance_id=instance_id, notice=notice):
                return await self._ending(event, instance_id, notice)
            case LifecycleHook() as waits:
                return await self._hook(event, waits)
            case Unparsed(detail=detail):
                log.warning("queue message not parsed", message=detail, step="check the rules that feed the queue")
                self._on_unparsed()
                await self._queue.hide(event, UNPARSED_HIDE_SECONDS)
                return []
            case Irrelevant(detail=detail):
                log.debug("queue message ignored", message=detail)
        await self._queue.delete(event)
        return []

    async def _notices(self, event: QueuedEvent, ids: tuple[str, ...], notice: ReclaimNotice) -> list[Fact]:
        state = self._view.state
        ours = [provider_id for name in ids if (provider_id := provider_id_of(state, name)) is not None]
        if not ours:
            return await self._unknown(event)
        if is_early(notice, event.received_at) and notice.reclaim_at is not None:
            due_in = notice.reclaim_at - MAINTENANCE_AHEAD - event.received_at
            await self._queue.hide(event, due_in.total_seconds() + 1.0)
            return []
        facts = [fact for provider_id in ours for fact in self._new(provider_id, notice, event)]
        if not facts:
            await self._queue.delete(event)
        return facts

    async def _ending(self, event: QueuedEvent, instance_id: str, notice: ReclaimNotice) -> list[Fact]:
        """Return a notice of a termination, unless the scaler's instance list shows it within END_LISTED."""
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

    async def _hook(self, event: QueuedEvent, waits: LifecycleHook) -> list[Fact]:
        """Let the group terminate the instance once its node is empty; each redelivery before is a heartbeat."""
        state = self._view.state
        provider_id = provider_id_of(state, waits.instance_id)
        if provider_id is None:
            return await self._unknown(event)
        if _is_empty(state, provider_id, event):
            await self._queue.complete_hook(waits.group, waits.hook, waits.token)
            await self._queue.delete(event)
            log.info("lifecycle hook completed", provider_id=provider_id, group=waits.group)
            return []
        await self._queue.extend_hook(waits.group, waits.hook, waits.token)
        return self._new(provider_id, waits.notice, event)

    async def _unknown(self, event: QueuedEvent) -> list[Fact]:
        """Delete a message that is not ours; keep one that may be of an instance not listed yet.

        The rule that feeds the queue matches every instance of the account.
        """
        if event.received_at - event.sent_at >= OURS_KNOWN:
            await self._queue.delete(event)
        return []

    def _new(self, provider_id: ProviderId, notice: ReclaimNotice, event: QueuedEvent) -> list[Fact]:
        known = notices_of(self._view.state, provider_id)
        fact = new_notice(provider_id, None, notice, known, event.received_at, channel="queue")
        return [] if fact is None else [fact]


def provider_id_of(state: ClusterState, instance_id: str) -> ProviderId | None:
    """Return the provider id of our instance with this cloud id; None if it is not known as ours."""
    suffix = f"/{instance_id}"
    for provider_id in state.instances:
        if provider_id.endswith(suffix):
            return provider_id
    for node in state.nodes.values():
        if node.action_id is not None and node.provider_id is not None and node.provider_id.endswith(suffix):
            return node.provider_id
    return None


def _is_empty(state: ClusterState, provider_id: ProviderId, event: QueuedEvent) -> bool:
    """Return True if the instance was drained or terminated, or has no node in a list made since the event."""
    drained = (record.drained for record in state.drains.values())
    if any(fact is not None and fact.provider_id == provider_id for fact in drained):
        return True
    instance = state.instances.get(provider_id)
    if instance is not None and instance.state == "terminated":
        return True
    if any(node.provider_id == provider_id for node in state.nodes.values()):
        return False
    synced = state.nodes_synced
    return synced is not None and synced.seen_at > event.sent_at
