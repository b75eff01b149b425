"""Limits of NodePools: groups sized by desired capacity (`providers/desired_capacity.py`), provisioned by Karpenter.

The limit is never chosen freely: it follows from the claims to keep and the pending orders. Order and limit are written
by one patch that fails if the pool changed since it was read. A claim carries its own order.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TypeVar

import msgspec
import structlog

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import PODS, Conflict, NotFound
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.providers.desired_capacity import Ledger
from gpu_autoscaler.providers.karpenter.catalog import Catalog
from gpu_autoscaler.providers.karpenter.node_pools import (
    ORDERS,
    ORDERS_LENGTH_MAX,
    OWNER,
    POOLS,
    WRITTEN,
    NodePool,
    PoolState,
    marks_of,
    missing_marks,
    note_of,
    pool_offer,
    pool_state,
)
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions, node_class_of
from gpu_autoscaler.providers.karpenter.wire import CLAIMS, NODE_POOL, NodeClaim
from gpu_autoscaler.providers.protocol import LaunchRefused, Order, misconfigured

WRITE_TRIES_MAX = 5  # Karpenter writes the status of the same object
# Karpenter looks at pending pods this often.
NO_POD_RETRY_SECONDS = 30.0

T = TypeVar("T")

log = structlog.get_logger()


class Selling(msgspec.Struct, frozen=True, kw_only=True):
    """A NodePool and its offer."""

    pool: NodePool
    offer: Offer

    @property
    def name(self) -> str:
        return self.pool.metadata.name

    @property
    def gpu_count(self) -> int:
        return self.offer.resources.gpu_count


class LimitedNodePools:
    """The NodePools of the settings. One process at a time writes to them."""

    def __init__(
        self,
        kube: KubeClient,
        options: KarpenterOptions,
        catalog: Catalog,
        installation: str,
        now: Callable[[], datetime],
    ) -> None:
        self._kube = kube
        self.names = options.node_pools
        self._class = node_class_of(options)
        self._catalog = catalog
        self._installation = installation
        self._now = now
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._ending: defaultdict[str, frozenset[str]] = defaultdict(frozenset)
        self._logged: dict[tuple[str, str], str] = {}  # last logged sentence, by pool and topic

    # ---- offers

    async def selling(self) -> Sequence[Selling]:
        """Return the usable pools with their offers; unusable ones are logged once. Raises TransientError,
        PermanentError without permission."""
        usable = []
        for name in self.names:
            try:
                pool = await self.read(name)
                usable.append(Selling(pool=pool, offer=self.offer_of_pool(pool)))
                self._logged.pop((name, "makes"), None)
            except LaunchRefused as exc:
                self._log_once(name, "makes", str(exc))
        return usable

    async def inspect(self, name: str) -> tuple[Selling, tuple[str, str] | None]:
        """Return the pool with its offer, and why nothing may be written to it, as code and sentence. Raises
        LaunchRefused, TransientError, PermanentError."""
        pool = await self.read(name)
        selling = Selling(pool=pool, offer=self.offer_of_pool(pool))
        claims = await self._kube.list_all(CLAIMS, {"labelSelector": f"{NODE_POOL}={name}"})
        # `doctor` does not always know the installation.
        installation = pool.metadata.annotations.get(OWNER, "") if self._installation == "*" else self._installation
        state = pool_state(pool, claims, installation, self._now().timestamp(), self._ending[name], "")
        return selling, state.problem(installation, selling.gpu_count)

    async def read(self, name: str) -> NodePool:
        """Return the pool. Raises LaunchRefused if it does not exist, TransientError, PermanentError."""
        try:
            return await self._kube.get(POOLS, "", name)
        except NotFound as exc:
            raise _refused("NodePoolNotFound", f"NodePool {name} not found; check karpenter.node_pools") from exc

    def offer_of_pool(self, pool: NodePool) -> Offer:
        """Return the pool's offer. Raises LaunchRefused."""
        try:
            return pool_offer(pool, self._catalog.offers(), self._catalog.labels(), self._class)
        except PermanentError as exc:
            raise _refused("NodePoolUnfit", str(exc)) from exc

    async def for_order(self, order: Order) -> Selling:
        """Return the pool that offers the order, with its labels and taints. Raises LaunchRefused, TransientError."""
        candidates = [selling for selling in await self.selling() if selling.offer.key == order.offer.key]
        if not candidates:
            raise _refused("NodePoolNotFound", f"no NodePool of karpenter.node_pools offers {order.offer.key}")
        for selling in candidates:
            if not missing_marks(selling.pool, selling.offer, order):
                return selling
        missing = ", ".join(missing_marks(candidates[0].pool, candidates[0].offer, order))
        raise _refused(
            "NodePoolUnfit", f"nodes of NodePool {candidates[0].name} lack {missing}; add it to the pool's template"
        )

    async def check_pending_pod(self, selling: Selling) -> None:
        """Raise LaunchRefused if no pending pod fits a machine of the pool: Karpenter would launch none. Pods of a
        suspended Job do not exist yet, so gangs and capacity buffers cannot be launched this way."""
        query = {"fieldSelector": "spec.nodeName=,status.phase=Pending"}
        known = selling.pool.labels | {
            labels.INSTANCE_TYPE: selling.offer.instance_type,
            labels.ZONE: selling.offer.zone,
        }
        for pod in await self._kube.list_all(PODS, query):
            gpu_count = pod_requests(pod).gpu_count
            is_elsewhere = any(known.get(key, value) != value for key, value in pod.spec.node_selector.items())
            if not pod.spec.scheduling_gates and not is_elsewhere and 0 < gpu_count <= selling.gpu_count:
                return
        raise LaunchRefused(
            f"NoPendingPod: Karpenter launches a machine of NodePool {selling.name} only for a pending pod, and none"
            " fits: jobs that are suspended until their nodes exist (gangs) and capacity buffers are not supported with"
            ' karpenter.mode = "limits"',
            code="NoPendingPod",
            scope="offer",
            retry_after_seconds=NO_POD_RETRY_SECONDS,
        )

    # ---- orders

    async def advance(self, selling: Selling, order: Order) -> NodeClaim | None:
        """Record the order and allow its GPUs; return its claim, None if there is none yet. Raises LaunchRefused if
        nothing may be written, TransientError, PermanentError."""
        return await self._locked(selling.name, lambda: self._advance(selling, order))

    async def _advance(self, selling: Selling, order: Order) -> NodeClaim | None:
        state = await self._read_state(selling, order.action_id)
        claim = state.claim_of(order.action_id)
        if claim is not None:
            return claim
        self._check_problem(state, selling)
        ledger = state.ledger
        if not ledger.is_pending(order.action_id):  # a pending one may have its machine, with its pod running there
            await self.check_pending_pod(selling)
        if not state.wants(order.action_id):
            second = int(self._now().timestamp())
            ledger = ledger.without_order(order.action_id).with_order(order.action_id, note_of(order, second))
        if ledger != state.ledger or state.pool.gpu_limit != state.required_gpus(ledger, selling.gpu_count):
            await self._write(state, ledger, state.required_gpus(ledger, selling.gpu_count))
        return None

    async def begin_withdrawal(self, selling: Selling, order: Order) -> None:
        """Lower the limit by the order, which stays pending until `withdraw`, for a claim that appears anyway. A claim
        without a machine is deleted. Raises TransientError if it has one, and as `advance`."""
        await self._locked(selling.name, lambda: self._begin_withdrawal(selling, order))

    async def _begin_withdrawal(self, selling: Selling, order: Order) -> None:
        state = await self._read_state(selling, order.action_id)
        claim = state.claim_of(order.action_id)
        if claim is not None and claim.status.provider_id:
            raise TransientError(f"NodePool {selling.name} launched {claim.metadata.name} anyway; retried")
        if claim is not None:
            self._ending[selling.name] |= {claim.metadata.name}
            state = msgspec.structs.replace(state, ending=state.ending | {claim.metadata.name})
            if state.problem(self._installation, selling.gpu_count) is not None:
                await self._kube.remove(CLAIMS, claim)
        self._check_problem(state, selling)
        note = note_of(order, int(self._now().timestamp()), is_withdrawing=True)
        ledger = state.ledger.without_order(order.action_id).with_order(order.action_id, note)
        await self._write(state, ledger, state.required_gpus(ledger, selling.gpu_count))
        if claim is not None:
            await self._kube.remove(CLAIMS, claim)

    async def withdraw(self, selling: Selling, order: Order) -> None:
        """Remove the order and verify it. Raises TransientError if a claim appeared anyway, and as `advance`."""
        required, after = await self._locked(selling.name, lambda: self._withdraw(selling, order))
        if after.gpu_limit != required:
            raise TransientError(f"NodePool {selling.name} still allows {after.gpu_limit} GPUs; retried")

    async def _withdraw(self, selling: Selling, order: Order) -> tuple[int, NodePool]:
        state = await self._read_state(selling, order.action_id)
        claim = state.claim_of(order.action_id)
        if claim is not None and (claim.metadata.deletion_timestamp is None or claim.status.provider_id):
            raise TransientError(f"NodePool {selling.name} launched {claim.metadata.name} anyway; retried")
        self._check_problem(state, selling)
        ledger = state.ledger.without_order(order.action_id)
        required = state.required_gpus(ledger, selling.gpu_count)
        await self._write(state, ledger, required)
        return required, await self.read(selling.name)

    # ---- lowering limits

    async def settle_all(self) -> None:
        """Assign new claims to orders, and lower the limits of pools that lost claims. Raises TransientError."""
        for selling in await self.selling():
            await self._settle(selling)

    async def before_termination(self, claim: NodeClaim) -> None:
        """Keep Karpenter from replacing a claim that is about to be deleted. Raises TransientError."""
        name = claim.metadata.labels.get(NODE_POOL, "")
        for selling in await self.selling() if name in self.names else ():
            if selling.name == name:
                self._ending[name] |= {claim.metadata.name}
                await self._settle(selling)

    async def _settle(self, selling: Selling) -> None:
        await self._locked(selling.name, lambda: self._lower(selling))

    async def _lower(self, selling: Selling) -> None:
        state = await self._read_state(selling, "")
        if state.pool.metadata.annotations.get(OWNER) is None:
            return
        if (problem := state.problem(self._installation, selling.gpu_count)) is not None:
            self._log_once(selling.name, "limits", problem[1])
            return
        self._logged.pop((selling.name, "limits"), None)
        required = state.required_gpus(state.ledger, selling.gpu_count)
        if (state.pool.gpu_limit or 0) > required:
            await self._write(state, state.ledger, required)

    # ---- reading and writing one pool

    async def _locked(self, name: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the attempt's result, repeated if the pool changed meanwhile. Raises TransientError if it always
        changes."""
        async with self._locks[name]:
            for _ in range(WRITE_TRIES_MAX):
                with contextlib.suppress(Conflict):
                    return await attempt()
        raise TransientError(f"NodePool {name} changes constantly; retried")

    async def _read_state(self, selling: Selling, requested: str) -> PoolState:
        """Return the pool's state; new claims get the labels of their orders, and the ledger is written."""
        name = selling.name
        for _ in range(WRITE_TRIES_MAX):
            pool = await self.read(name)
            claims = await self._kube.list_all(CLAIMS, {"labelSelector": f"{NODE_POOL}={name}"})
            now = self._now().timestamp()
            state = pool_state(pool, claims, self._installation, now, self._ending[name], requested)
            self._ending[name] = state.ending
            if not state.newly_assigned:
                return state
            if state.problem(self._installation, selling.gpu_count) is not None:
                assigned = state.ledger.assigned
                kept = {member: order for member, order in assigned.items() if member not in state.newly_assigned}
                ledger = msgspec.structs.replace(state.ledger, assigned=kept)
                return msgspec.structs.replace(state, ledger=ledger, newly_assigned={})
            try:
                for member, (action_id, note) in state.newly_assigned.items():
                    await self._mark(state.claims[member], action_id, note, selling.offer)
                await self._write(state, state.ledger, None)
            except (Conflict, NotFound):
                continue  # Karpenter changed it too
        raise TransientError(f"NodePool {name} changes constantly; retried")

    async def _mark(self, claim: NodeClaim, action_id: ActionId, note: str, offer: Offer) -> None:
        marks, notes = marks_of(action_id, note, offer, self._installation)
        metadata = claim.metadata
        patch = {
            "uid": metadata.uid,
            "resourceVersion": metadata.resource_version,
            "labels": marks,
            "annotations": notes,
        }
        await self._kube.change(CLAIMS, "", metadata.name, {"metadata": patch})
        if claim.status.node_name:  # Karpenter has already copied the claim's labels to the node
            with contextlib.suppress(NotFound):
                await self._kube.patch_node(claim.status.node_name, {"metadata": {"labels": marks}})

    async def _write(self, state: PoolState, ledger: Ledger, gpu_limit: int | None) -> NodePool:
        """Write ledger and GPU limit (None: unchanged), unless the pool changed meanwhile. Raises Conflict."""
        foreign_members = ledger.foreign_members & frozenset(state.claims)
        bare = msgspec.structs.replace(ledger, assigned={}, foreign_members=foreign_members)
        texts = bare.encode(ORDERS_LENGTH_MAX, 1, ())
        metadata = state.pool.metadata
        if texts is None:
            raise _refused("LedgerFull", f"annotation of NodePool {metadata.name} cannot hold another order")
        notes: dict[str, str] = {OWNER: self._installation, ORDERS: "".join(texts)}
        spec = {}
        if gpu_limit is not None:
            notes[WRITTEN] = str(gpu_limit)
            spec = {"spec": {"limits": {GPU_RESOURCE: str(gpu_limit)}}}
        patch = {"metadata": {"resourceVersion": metadata.resource_version, "annotations": notes}, **spec}
        return await self._kube.change(POOLS, "", metadata.name, patch)

    def _check_problem(self, state: PoolState, selling: Selling) -> None:
        if (problem := state.problem(self._installation, selling.gpu_count)) is not None:
            self._log_once(selling.name, "limits", problem[1])
            raise _refused(*problem)

    def _log_once(self, name: str, topic: str, sentence: str) -> None:
        if self._logged.get((name, topic)) != sentence:
            log.warning("node pool skipped", node_pool=name, reason=sentence)
        self._logged[name, topic] = sentence


def _refused(code: str, sentence: str) -> LaunchRefused:
    return misconfigured(f"{code}: {sentence}", code)
