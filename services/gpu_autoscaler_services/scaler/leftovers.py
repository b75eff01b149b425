"""The executor's hand on nodes whose instance is gone: what `core/removing/leftovers.py` finds due goes, no more.

It looks before it deletes. The cloud is asked for that very instance, and has to say twice, some time apart, that it
is gone; the node has to be the one that was meant, still silent, and is deleted in the very version that was seen.
What was asked before is forgotten with a restart, which costs a minute. On record is only that it was done.
"""

import asyncio
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.removing.leftovers import Leftover, leftovers
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingNodeRemoved
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import NODES, Conflict, KubeApi, NotFound
from gpu_autoscaler.kube.translate.common import condition
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import NodeUid, ProviderId
from gpu_autoscaler.providers.protocol import CapacityProvider, ShowsOne

NODES_PER_TICK_MAX = 8  # all at once; the rest at the next one
ANSWER_WALL_SECONDS_MAX = 3.0  # a plan may wait for this tick to end, and no plan waits for a slow cloud
# Between the first word that the instance is gone and the one that counts: a cloud's answer may come from a part of it
# that lags behind (EC2 Developer Guide, "Eventual consistency in the Amazon EC2 API", read 2026-11-22).
ASKED_AGAIN_SECONDS = 60.0
REFUSED_SECONDS = 600.0  # until a node is looked at again that may not be deleted, or whose instance is another's

log = structlog.get_logger()


class Leftovers:
    """Deletes node objects."""

    def __init__(self, kube: KubeApi, provider: CapacityProvider) -> None:
        """A provider that cannot be asked about one instance keeps all nodes as they are."""
        self._kube = kube
        self._provider = provider
        self._asked_at: dict[NodeUid, datetime] = {}  # since when every answer was that its instance is gone
        self._looked_again_at: dict[NodeUid, datetime] = {}  # not before
        self._refused: set[NodeUid] = set()  # of which it was told already that they cannot be removed

    async def remove(self, state: ClusterState, policy: ScalingPolicy, now: datetime) -> list[ScalingNodeRemoved]:
        """Delete what is due, within the limit of one tick; return what was deleted."""
        provider = self._provider
        if not isinstance(provider, ShowsOne):
            return []
        due = leftovers(state, policy, now)
        self._forget_all_but({one.node_uid for one in due})
        due = tuple(one for one in due if self._looked_again_at.get(one.node_uid, now) <= now)[:NODES_PER_TICK_MAX]
        looks = await asyncio.gather(*(self._look_at(one, provider, now) for one in due))
        return [removed for removed in looks if removed is not None]

    def _forget_all_but(self, uids: set[NodeUid]) -> None:
        for kept in (self._asked_at, self._looked_again_at):
            for uid in kept.keys() - uids:
                del kept[uid]
        self._refused &= uids

    async def _look_at(self, one: Leftover, provider: ShowsOne, now: datetime) -> ScalingNodeRemoved | None:
        uid, name = one.node_uid, one.node_name
        self._looked_again_at[uid] = now + timedelta(seconds=ASKED_AGAIN_SECONDS)
        try:
            if not await _is_gone(provider, one.provider_id):
                self._asked_at.pop(uid, None)
                return None
            asked_at = self._asked_at.setdefault(uid, now)
            if now - asked_at < timedelta(seconds=ASKED_AGAIN_SECONDS) or not await self._delete(one):
                return None
        except (NotFound, Conflict):
            return None  # gone, or changed under way: what is due shows at the next look
        except TransientError as exc:
            self._looked_again_at.pop(uid)
            log.warning("node of an instance that is gone not removed, tried again", node=name, error=str(exc))
            return None
        except PermanentError as exc:
            self._looked_again_at[uid] = now + timedelta(seconds=REFUSED_SECONDS)
            if uid not in self._refused:
                log.warning("node of an instance that is gone not removed", node=name, error=str(exc))
            self._refused.add(uid)
            return None
        log.info("node of an instance that is gone removed", node=name, provider_id=one.provider_id)
        return ScalingNodeRemoved(
            node_uid=uid, node_name=name, provider_id=one.provider_id, asked_at=asked_at, removed_at=now
        )

    async def _delete(self, one: Leftover) -> bool:
        """Return whether it was deleted, by us and now."""
        node = await self._kube.get(NODES, "", one.node_name)
        if not _is_meant(node, one):
            return False
        held = node.metadata.finalizers
        if labels.TERMINATION_FINALIZER in held:
            # First, as nothing is left to be emptied; else the deletion would look like one by hand.
            patch = {
                "metadata": {
                    "uid": node.metadata.uid,
                    "resourceVersion": node.metadata.resource_version,
                    "finalizers": [each for each in held if each != labels.TERMINATION_FINALIZER],
                }
            }
            node = await self._kube.patch_node(one.node_name, patch)
        return await self._kube.delete_node(node)


async def _is_gone(provider: ShowsOne, provider_id: ProviderId) -> bool:
    try:
        async with asyncio.timeout(ANSWER_WALL_SECONDS_MAX):
            instance = await provider.instance(provider_id)
    except TimeoutError as exc:
        what = f"the cloud has not said within {ANSWER_WALL_SECONDS_MAX:g} s what has become of {provider_id}"
        raise TransientError(what) from exc
    return instance is None or instance.state == "terminated"


def _is_meant(node: wire.Node, one: Leftover) -> bool:
    """True for that very node, while its kubelet is silent and nobody else deletes it."""
    ready = condition(node.status.conditions, "Ready")
    is_ready = ready is not None and ready.status == "True"
    is_same = node.metadata.uid == one.node_uid and node.spec.provider_id == one.provider_id
    return is_same and not is_ready and node.metadata.deletion_timestamp is None
