"""Role `nodes`: polls the instance metadata of all managed nodes, by address template.

A failed poll never withdraws a notice.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime

import aiohttp
import structlog

from gpu_autoscaler.cloudmeta.notices import notice_facts, notices_of, rebalance_fact
from gpu_autoscaler.cloudmeta.protocol import InstanceMetadata, ReleasesEvents
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.model.ids import NodeUid, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.addresses import NodeUrl
from gpu_autoscaler.runtime.projection import StateView

POLLS_AT_ONCE_MAX = 64
READS_OF_POLL_MAX = 2  # concurrently, of one instance
POLL_SECONDS_MAX = 2.0  # wall time of one instance: the notices of others wait no longer for it
HINT_EVERY_POLLS = 6  # a rebalance recommendation has no deadline

METADATA_REMEDY = "set hostNetwork on the pod, or a metadata hop limit of 2, and allow metadata tokens"
# The instances (or the node, if its instance is unknown) that do not answer -> why. Empty: all answer.
OnUnreadable = Callable[[Mapping[str, str]], None]

log = structlog.get_logger()


def metadata_session() -> aiohttp.ClientSession:
    """Return a session with one connection per concurrent read: a notice must not wait for a connection."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=POLLS_AT_ONCE_MAX * READS_OF_POLL_MAX))


class Unreadable:
    """The instances whose metadata cannot be read now; each is reported once."""

    def __init__(self, on_change: OnUnreadable) -> None:
        self._on_change = on_change
        self._reasons: dict[str, str] = {}  # instance or node -> why

    def answered(self, name: str) -> None:
        """Note that the metadata of this instance or node was read."""
        if self._reasons.pop(name, None) is not None:
            log.info("metadata polls restored", provider_id=name)
            self._on_change(self._reasons)

    def failed(self, name: str, why: str) -> None:
        """Note that the metadata of this instance or node cannot be read; warn once."""
        if name not in self._reasons:
            self._reasons[name] = f"{name}: {why}; {METADATA_REMEDY}"
            log.warning(
                "metadata poll failed, notices would be missed", provider_id=name, error=why, step=METADATA_REMEDY
            )
            self._on_change(self._reasons)

    def retain(self, names: set[ProviderId]) -> None:
        """Forget instances other than these."""
        if gone := self._reasons.keys() - names:
            self._reasons = {name: why for name, why in self._reasons.items() if name not in gone}
            self._on_change(self._reasons)


class ManagedNodesPoller:
    """Polls the metadata address of every managed node that is not known to be on-demand.

    Remembers published recommendations and unreadable instances.
    """

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
        self._poll_seconds_max = poll_seconds_max
        self._unreadable = Unreadable(on_unreadable)
        self._hinted_at: dict[ProviderId, datetime] = {}  # published recommendations
        self._turns = asyncio.Semaphore(POLLS_AT_ONCE_MAX)
        self._polls_count = 0

    async def poll(self, now: datetime) -> list[Fact]:
        """Return new notices and rebalance recommendations."""
        with_hint = self._polls_count % HINT_EVERY_POLLS == 0
        self._polls_count += 1
        ours = [node for node in self._view.state.nodes.values() if node.action_id is not None]
        nodes = {node.node_uid: node for node in ours if node.capacity_type in (CapacityType.SPOT, None)}
        self._clients = {uid: client for uid, client in self._clients.items() if uid in nodes}
        provider_ids = {node.provider_id for node in nodes.values() if node.provider_id is not None}
        self._unreadable.retain(provider_ids)
        self._hinted_at = {key: at for key, at in self._hinted_at.items() if key in provider_ids}
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
            return await self._read(client, node, node.provider_id, now, with_hint=with_hint)

    async def _read(
        self, metadata: InstanceMetadata, node: NodeObserved, provider_id: ProviderId, now: datetime, *, with_hint: bool
    ) -> list[Fact]:
        """Return the new facts of this instance; nothing, and one warning, while its metadata cannot be read."""
        facts: list[Fact] = []
        try:
            async with asyncio.timeout(self._poll_seconds_max):
                shown = await metadata.reclaim_notices()
                known = notices_of(self._view.state, provider_id)
                facts += notice_facts(provider_id, node.name, shown, known, now)
                if shown and isinstance(metadata, ReleasesEvents):
                    drained = (record.drained for record in self._view.state.drains.values())
                    await metadata.release({fact.provider_id for fact in drained if fact and fact.provider_id})
                hint_at = await metadata.rebalance_recommended_at() if with_hint else None
        except (TransientError, TimeoutError) as exc:
            if node.is_ready:  # the instance of one that is not ready may be terminating
                self._unreadable.failed(provider_id, str(exc) or f"no answer within {self._poll_seconds_max:g} s")
            return facts
        self._unreadable.answered(provider_id)
        if hint_at is not None and self._hinted_at.get(provider_id) != hint_at:
            self._hinted_at[provider_id] = hint_at
            facts.append(rebalance_fact(provider_id, node.name, hint_at))
        return facts
