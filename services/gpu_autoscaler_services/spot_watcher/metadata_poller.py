"""Polls instance metadata: of all managed nodes by address template, or of the node that this process runs on.

A failed poll never withdraws a notice.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

import aiohttp
import structlog

from gpu_autoscaler.cloudmeta.protocol import InstanceMetadata, ReleasesEvents
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.model.ids import NodeUid, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.addresses import NodeUrl
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler_services.spot_watcher.notices import notice_facts, notices_of, rebalance_fact

POLLS_AT_ONCE_MAX = 64
READS_OF_POLL_MAX = 2  # concurrently, of one instance
POLL_SECONDS_MAX = 2.0  # wall time of one instance: the notices of others wait no longer for it
# A notice leaves two minutes, GCP's fifteen seconds; polling the host-local address may use one of them.
OWN_NODE_SECONDS = 1.0
HINT_EVERY_POLLS = 6  # a rebalance recommendation has no deadline

METADATA_REMEDY = "set hostNetwork on the pod, or a metadata hop limit of 2, and allow metadata tokens"
# The instances (or the node, if its instance is unknown) that do not answer -> why. Empty: all answer.
OnUnreadable = Callable[[Mapping[str, str]], None]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Target:
    """Whose metadata is read. No warning for a node that is not ready: its instance may be terminating."""

    provider_id: ProviderId
    node_name: str | None
    is_ready: bool = True


def metadata_session() -> aiohttp.ClientSession:
    """Return a session with one connection per concurrent read: a notice must not wait for a connection."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=POLLS_AT_ONCE_MAX * READS_OF_POLL_MAX))


class _Poller:
    """Polls notices and rebalance recommendations; remembers published recommendations and unreadable instances."""

    def __init__(self, view: StateView, poll_seconds_max: float, on_unreadable: OnUnreadable) -> None:
        self._view = view
        self._poll_seconds_max = poll_seconds_max
        self._on_unreadable = on_unreadable
        self._hinted_at: dict[ProviderId, datetime] = {}
        self._unreadable: dict[str, str] = {}  # instance or node -> why

    async def poll(self, metadata: InstanceMetadata, target: _Target, now: datetime, *, with_hint: bool) -> list[Fact]:
        """Return the new facts of this instance; nothing, and one warning, while its metadata cannot be read."""
        facts: list[Fact] = []
        try:
            async with asyncio.timeout(self._poll_seconds_max):
                shown = await metadata.reclaim_notices()
                known = notices_of(self._view.state, target.provider_id)
                facts += notice_facts(target.provider_id, target.node_name, shown, known, now)
                if shown and isinstance(metadata, ReleasesEvents):
                    drained = (record.drained for record in self._view.state.drains.values())
                    await metadata.release({fact.provider_id for fact in drained if fact and fact.provider_id})
                hint_at = await metadata.rebalance_recommended_at() if with_hint else None
        except (TransientError, TimeoutError) as exc:
            if target.is_ready:
                self.failed(target.provider_id, str(exc) or f"no answer within {self._poll_seconds_max:g} s")
            return facts
        self.answered(target.provider_id)
        if hint_at is not None and self._hinted_at.get(target.provider_id) != hint_at:
            self._hinted_at[target.provider_id] = hint_at
            facts.append(rebalance_fact(target.provider_id, target.node_name, hint_at))
        return facts

    def answered(self, name: str) -> None:
        """Note that the metadata of this instance or node was read."""
        if self._unreadable.pop(name, None) is not None:
            log.info("metadata polls restored", provider_id=name)
            self._on_unreadable(self._unreadable)

    def failed(self, name: str, why: str) -> None:
        """Note that the metadata of this instance or node cannot be read; warn once."""
        if name not in self._unreadable:
            self._unreadable[name] = f"{name}: {why}; {METADATA_REMEDY}"
            log.warning(
                "metadata poll failed, notices would be missed", provider_id=name, error=why, step=METADATA_REMEDY
            )
            self._on_unreadable(self._unreadable)

    def retain(self, provider_ids: set[ProviderId]) -> None:
        """Forget instances other than these."""
        if gone := self._unreadable.keys() - provider_ids:
            self._unreadable = {name: why for name, why in self._unreadable.items() if name not in gone}
            self._on_unreadable(self._unreadable)
        self._hinted_at = {key: at for key, at in self._hinted_at.items() if key in provider_ids}


class ManagedNodesPoller:
    """Role `nodes`: polls the metadata address of every managed node that is not known to be on-demand."""

    def __init__(
        self,
        view: StateView,
        open_metadata: Callable[[str], InstanceMetadata],
        *,
        metadata_url: str,
        poll_seconds_max: float = POLL_SECONDS_MAX,
        on_unreadable: OnUnreadable = lambda _: None,
    ) -> None:
        """`metadata_url`: a template of `NodeUrl`. `open_metadata`: the client of an address. Raises ConfigError."""
        self._view = view
        self._open_metadata = open_metadata
        self._url = NodeUrl(metadata_url)
        if self._url.is_shared:  # one node's notice would be published for every node
            error = f"sensing.metadata_url: {metadata_url!r} is one address for all nodes; add {{node_name}} to it"
            raise ConfigError("role nodes", [error])
        self._clients: dict[NodeUid, InstanceMetadata] = {}
        self._poller = _Poller(view, poll_seconds_max, on_unreadable)
        self._turns = asyncio.Semaphore(POLLS_AT_ONCE_MAX)
        self._polls_count = 0

    async def poll(self, now: datetime) -> list[Fact]:
        """Return new notices and rebalance recommendations."""
        with_hint = self._polls_count % HINT_EVERY_POLLS == 0
        self._polls_count += 1
        ours = [node for node in self._view.state.nodes.values() if node.action_id is not None]
        nodes = {node.node_uid: node for node in ours if node.capacity_type in (CapacityType.SPOT, None)}
        self._clients = {uid: client for uid, client in self._clients.items() if uid in nodes}
        self._poller.retain({node.provider_id for node in nodes.values() if node.provider_id is not None})
        results = await asyncio.gather(*(self._poll(node, now, with_hint=with_hint) for node in nodes.values()))
        return [fact for facts in results for fact in facts]

    async def _poll(self, node: NodeObserved, now: datetime, *, with_hint: bool) -> list[Fact]:
        address = self._url.of(node)
        if address is None or node.provider_id is None:
            return []
        client = self._clients.get(node.node_uid)
        if client is None:
            client = self._clients[node.node_uid] = self._open_metadata(address)
        async with self._turns:
            target = _Target(node.provider_id, node.name, node.is_ready)
            return await self._poller.poll(client, target, now, with_hint=with_hint)


class OwnNodePoller:
    """Role `node`: polls the metadata address of the node that this process runs on."""

    def __init__(
        self,
        view: StateView,
        metadata: InstanceMetadata,
        *,
        node_name: str | None,
        on_unreadable: OnUnreadable = lambda _: None,
    ) -> None:
        self._metadata = metadata
        self._node_name = node_name
        self._provider_id: ProviderId | None = None
        self._poller = _Poller(view, POLL_SECONDS_MAX, on_unreadable)
        self._polls_count = 0

    async def poll(self, now: datetime) -> Outcome:
        """Return new notices and rebalance recommendations. Raises TransientError until the instance is known."""
        if self._provider_id is None:
            own = self._node_name or "this node"
            try:
                self._provider_id = await self._metadata.provider_id()
            except TransientError as exc:
                self._poller.failed(own, str(exc))
                raise
            self._poller.answered(own)
        target = _Target(self._provider_id, self._node_name)
        with_hint = self._polls_count % HINT_EVERY_POLLS == 0
        self._polls_count += 1
        facts = await self._poller.poll(self._metadata, target, now, with_hint=with_hint)
        return Outcome(facts=tuple(facts), next_tick_seconds=OWN_NODE_SECONDS)
