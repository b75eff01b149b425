"""Reads instance metadata: of all managed nodes by address template, or of the node that this process runs on.

A poll that fails is never "no notice".
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import aiohttp
import structlog

from gpu_autoscaler.cloudmeta.protocol import InstanceMetadata, WaitsForDrains
from gpu_autoscaler.core.state import NoticeRecord
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.model.ids import NodeUid, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.addresses import NodeUrl
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler_services.spot_watcher.notices import notice_facts, rebalance_fact

POLLS_AT_ONCE_MAX = 64
READS_OF_POLL_MAX = 2  # at once, of one instance
POLL_SECONDS_MAX = 2.0  # wall time of one instance: the notices of others wait no longer for it
# Of the two minutes that a notice leaves, and of GCP's fifteen seconds, asking takes one. The address is on the host.
OWN_NODE_SECONDS = 1.0
HINT_EVERY_POLLS = 6  # a hint has no deadline: now and then will do

TO_BE_SEEN_TO = "see that the pod has hostNetwork, or the metadata's hop limit is 2, and that tokens are given"
# Who does not answer, and why: instance, or node where that is not known yet -> words. Empty: everybody answers.
TellDeaf = Callable[[Mapping[str, str]], None]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Asked:
    """Whose metadata is read. An instance whose node is not ready may well be on its way out: nobody is warned."""

    provider_id: ProviderId
    node_name: str | None
    is_ready: bool = True


def metadata_session() -> aiohttp.ClientSession:
    """Return connections for as many reads as there may be at once: one that waits for a connection comes too late."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=POLLS_AT_ONCE_MAX * READS_OF_POLL_MAX))


class _Poller:
    """Reads notices and hints, tick after tick; remembers hints it has told, and who does not answer."""

    def __init__(self, view: StateView, poll_seconds_max: float, tell_deaf: TellDeaf) -> None:
        self._view = view
        self._poll_seconds_max = poll_seconds_max
        self._tell_deaf = tell_deaf
        self._hinted_at: dict[ProviderId, datetime] = {}
        self._deaf: dict[str, str] = {}  # who does not answer -> why

    async def poll(self, metadata: InstanceMetadata, asked: _Asked, now: datetime, *, with_hint: bool) -> list[Fact]:
        """Return what is new of this instance; nothing, and a warning once, while its address cannot be read."""
        facts: list[Fact] = []
        try:
            async with asyncio.timeout(self._poll_seconds_max):
                shown = await metadata.reclaim_notices()
                facts += notice_facts(asked.provider_id, asked.node_name, shown, self._known(asked), now)
                if shown and isinstance(metadata, WaitsForDrains):
                    await metadata.release(self._drained())
                hint_at = await metadata.rebalance_recommended_at() if with_hint else None
        except (TransientError, TimeoutError) as exc:
            self._missed(asked, exc)
            return facts
        self.heard(asked.provider_id)
        if hint_at is not None and self._hinted_at.get(asked.provider_id) != hint_at:
            self._hinted_at[asked.provider_id] = hint_at
            facts.append(rebalance_fact(asked.provider_id, asked.node_name, hint_at))
        return facts

    def heard(self, who: str) -> None:
        """Who answered: nothing of it would be missed now."""
        if self._deaf.pop(who, None) is not None:
            log.info("notices can be read again", provider_id=who)
            self._tell_deaf(self._deaf)

    def missed(self, who: str, why: str) -> None:
        """Say once that a notice of this instance would be missed, and what to look at."""
        if who not in self._deaf:
            self._deaf[who] = f"{who}: {why}; {TO_BE_SEEN_TO}"
            log.warning("notices cannot be read, one would be missed", provider_id=who, error=why, step=TO_BE_SEEN_TO)
            self._tell_deaf(self._deaf)

    def _drained(self) -> set[ProviderId]:
        """Every instance whose node was emptied to the end."""
        told = (drain.drained for drain in self._view.state.drains.values())
        return {one.provider_id for one in told if one is not None and one.provider_id is not None}

    def _known(self, asked: _Asked) -> list[NoticeRecord]:
        notices = self._view.state.notices.values()
        return [record for record in notices if record.notice.provider_id == asked.provider_id]

    def _missed(self, asked: _Asked, error: Exception) -> None:
        if asked.is_ready:
            self.missed(asked.provider_id, str(error) or f"no answer within {self._poll_seconds_max:g} s")

    def forget_all_but(self, provider_ids: set[ProviderId]) -> None:
        """Drop what is remembered of instances that are gone."""
        if gone := self._deaf.keys() - provider_ids:
            self._deaf = {who: why for who, why in self._deaf.items() if who not in gone}
            self._tell_deaf(self._deaf)
        self._hinted_at = {key: at for key, at in self._hinted_at.items() if key in provider_ids}


class NodesNotices:
    """Role `nodes`: polls the metadata address of every managed node that is not known to be on-demand."""

    def __init__(
        self,
        view: StateView,
        open_metadata: Callable[[str], InstanceMetadata],
        *,
        metadata_url: str,
        poll_seconds_max: float = POLL_SECONDS_MAX,
        tell_deaf: TellDeaf = lambda _: None,
    ) -> None:
        """`metadata_url`: a template of `NodeUrl`; `open_metadata`: a client for an address. Raises ConfigError."""
        self._view = view
        self._open_metadata = open_metadata
        self._url = NodeUrl(metadata_url)
        if self._url.is_shared:  # one node's notice would be told of every node
            mistake = f"sensing.metadata_url: {metadata_url!r} is one address for all nodes; put {{node_name}} in it"
            raise ConfigError("role nodes", [mistake])
        self._clients: dict[NodeUid, InstanceMetadata] = {}
        self._poller = _Poller(view, poll_seconds_max, tell_deaf)
        self._turns = asyncio.Semaphore(POLLS_AT_ONCE_MAX)
        self._polls_count = 0

    async def look(self, now: datetime) -> list[Fact]:
        """Return the notices and hints that are new."""
        with_hint = self._polls_count % HINT_EVERY_POLLS == 0
        self._polls_count += 1
        nodes = [node for node in self._view.state.nodes.values() if _may_be_taken(node)]
        self._forget(nodes)
        told = await asyncio.gather(*(self._poll(node, now, with_hint=with_hint) for node in nodes))
        return [fact for facts in told for fact in facts]

    async def _poll(self, node: NodeObserved, now: datetime, *, with_hint: bool) -> list[Fact]:
        address = self._url.of(node)
        if address is None or node.provider_id is None:
            return []
        client = self._clients.get(node.node_uid)
        if client is None:
            client = self._clients[node.node_uid] = self._open_metadata(address)
        async with self._turns:
            asked = _Asked(node.provider_id, node.name, node.is_ready)
            return await self._poller.poll(client, asked, now, with_hint=with_hint)

    def _forget(self, nodes: Sequence[NodeObserved]) -> None:
        uids = {node.node_uid for node in nodes}
        self._clients = {uid: client for uid, client in self._clients.items() if uid in uids}
        self._poller.forget_all_but({node.provider_id for node in nodes if node.provider_id is not None})


def _may_be_taken(node: NodeObserved) -> bool:
    """Return whether a notice may come: ours, and not known to be bought for good. Unknown is not on-demand."""
    return node.action_id is not None and node.capacity_type in (CapacityType.SPOT, None)


class NodeNotices:
    """Role `node`: polls the one metadata address of the node that it runs on."""

    def __init__(
        self,
        view: StateView,
        metadata: InstanceMetadata,
        *,
        node_name: str | None,
        tell_deaf: TellDeaf = lambda _: None,
    ) -> None:
        self._metadata = metadata
        self._node_name = node_name
        self._provider_id: ProviderId | None = None
        self._poller = _Poller(view, POLL_SECONDS_MAX, tell_deaf)
        self._polls_count = 0

    async def look(self, now: datetime) -> Outcome:
        """Return the notices and hints that are new. Raises TransientError until the instance is known."""
        if self._provider_id is None:
            own = self._node_name or "this node"
            try:
                self._provider_id = await self._metadata.provider_id()
            except TransientError as exc:
                self._poller.missed(own, str(exc))
                raise
            self._poller.heard(own)
        asked = _Asked(self._provider_id, self._node_name)
        with_hint = self._polls_count % HINT_EVERY_POLLS == 0
        self._polls_count += 1
        facts = await self._poller.poll(self._metadata, asked, now, with_hint=with_hint)
        return Outcome(facts=tuple(facts), next_tick_seconds=OWN_NODE_SECONDS)
