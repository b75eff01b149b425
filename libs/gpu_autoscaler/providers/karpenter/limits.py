"""Writes the limits of NodePools: a count driver (`providers/desired_capacity.py`) of which Karpenter makes the machines.

The number is never chosen: it follows from the claims that are to stay and the orders that stand. Order and number are
written by one patch that fails where the pool was changed since it was read. Whose a claim is stands on itself.
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
from gpu_autoscaler.kube.protocol import PODS, Conflict, Kind, NotFound, ObjectT
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.providers.desired_capacity import Ledger
from gpu_autoscaler.providers.karpenter.catalog import Shelf
from gpu_autoscaler.providers.karpenter.node_pools import (
    ORDERS,
    ORDERS_LENGTH_MAX,
    OWNER,
    POOLS,
    WRITTEN,
    Look,
    NodePool,
    lacking,
    look_at,
    marks_of,
    note_of,
    sold_by,
)
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions, node_class_of
from gpu_autoscaler.providers.karpenter.wire import CLAIMS, NODE_POOL, NodeClaim
from gpu_autoscaler.providers.protocol import LaunchRefused, Order

WRITE_TRIES_MAX = 5  # Karpenter writes the status of the same object
# As often as pods that wait are looked at anew by Karpenter; capacity that may come with the next one.
NO_POD_RETRY_SECONDS = 30.0

T = TypeVar("T")

log = structlog.get_logger()


class Selling(msgspec.Struct, frozen=True, kw_only=True):
    """A pool, and what it makes."""

    pool: NodePool
    offer: Offer

    @property
    def name(self) -> str:
        """The pool's."""
        return self.pool.metadata.name

    @property
    def gpu_count(self) -> int:
        """Of one machine."""
        return self.offer.resources.gpu_count


class LimitedPools:
    """The NodePools of the settings. One process at a time writes to them."""

    def __init__(
        self,
        kube: KubeClient,
        options: KarpenterOptions,
        shelf: Shelf,
        installation: str,
        now: Callable[[], datetime],
    ) -> None:
        self._kube = kube
        self.names = options.node_pools
        self._class = node_class_of(options)
        self._shelf = shelf
        self._installation = installation
        self._now = now
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._ending: defaultdict[str, frozenset[str]] = defaultdict(frozenset)
        self._told: dict[tuple[str, str], str] = {}  # of pools, of what they make and their limits: what was said last

    # ---- what is sold

    async def selling(self) -> Sequence[Selling]:
        """Return the pools that can be bought from, with what their machines are; others are told once. Raises
        TransientError, PermanentError without the right."""
        found = []
        for name in self.names:
            try:
                pool = await self.read(name)
                found.append(Selling(pool=pool, offer=self.sold(pool)))
                self._told.pop((name, "makes"), None)
            except LaunchRefused as exc:
                self._tell(name, "makes", str(exc))
        return found

    async def seen(self, name: str) -> tuple[Selling, tuple[str, str] | None]:
        """Return the pool with what it makes, and why nothing may be written to it: a word and a sentence. Raises
        LaunchRefused, TransientError, PermanentError."""
        pool = await self.read(name)
        selling = Selling(pool=pool, offer=self.sold(pool))
        claims = await self._all(CLAIMS, {"labelSelector": f"{NODE_POOL}={name}"})
        # `doctor` does not always know whose eyes it looks with.
        who = pool.metadata.annotations.get(OWNER, "") if self._installation == "*" else self._installation
        look = look_at(pool, claims, who, self._now().timestamp(), self._ending[name], "")
        return selling, look.problem(who, selling.gpu_count)

    async def read(self, name: str) -> NodePool:
        """Return the pool. Raises LaunchRefused where it is not there, TransientError, PermanentError."""
        try:
            return await self._kube.get(POOLS, "", name)
        except NotFound as exc:
            raise _refused("NodePoolNotFound", f"there is no NodePool {name}; see karpenter.node_pools") from exc

    def sold(self, pool: NodePool) -> Offer:
        """Return what it makes. Raises LaunchRefused."""
        try:
            return sold_by(pool, self._shelf.offers(), self._shelf.labels(), self._class)
        except PermanentError as exc:
            raise _refused("NodePoolUnfit", str(exc)) from exc

    async def for_order(self, order: Order) -> Selling:
        """Return the pool that makes what is ordered, with labels and taints. Raises LaunchRefused, TransientError."""
        fitting = [one for one in await self.selling() if one.offer.key == order.offer.key]
        if not fitting:
            raise _refused("NodePoolNotFound", f"no NodePool of karpenter.node_pools makes {order.offer.key}")
        for one in fitting:
            if not lacking(one.pool, one.offer, order):
                return one
        missing = ", ".join(lacking(fitting[0].pool, fitting[0].offer, order))
        raise _refused(
            "NodePoolUnfit", f"nodes of NodePool {fitting[0].name} lack {missing}: write it into its template"
        )

    async def see_that_somebody_waits(self, selling: Selling) -> None:
        """Raise LaunchRefused where no pod waits that a machine of the pool could take: Karpenter would make none. Pods
        of a held Job are not there yet, so a gang of ours waits in vain, as do machines in advance."""
        query = {"fieldSelector": "spec.nodeName=,status.phase=Pending"}
        known = selling.pool.labels | {
            labels.INSTANCE_TYPE: selling.offer.instance_type,
            labels.ZONE: selling.offer.zone,
        }
        for pod in await self._all(PODS, query):
            gpu_count = pod_requests(pod).gpu_count
            is_elsewhere = any(known.get(key, value) != value for key, value in pod.spec.node_selector.items())
            if not pod.spec.scheduling_gates and not is_elsewhere and 0 < gpu_count <= selling.gpu_count:
                return
        raise LaunchRefused(
            f"NoPodWaits: Karpenter makes a machine of NodePool {selling.name} only for a pod that waits, and there is"
            " none that it could take: jobs that are held until their nodes are there (gangs), and nodes in advance,"
            ' are not bought with karpenter.mode = "limits"',
            code="NoPodWaits",
            scope="offer",
            retry_after_seconds=NO_POD_RETRY_SECONDS,
        )

    # ---- orders

    async def step(self, selling: Selling, order: Order) -> NodeClaim | None:
        """See that the order stands and that its GPU is allowed; return its claim, None: there is none yet.

        Raises LaunchRefused where nothing may be written, TransientError, PermanentError.
        """
        return await self._in_turn(selling.name, lambda: self._step(selling, order))

    async def _step(self, selling: Selling, order: Order) -> NodeClaim | None:
        look = await self._look(selling, order.action_id)
        claim = look.claim_of(order.action_id)
        if claim is not None:
            return claim
        self._see_problem(look, selling)
        ledger = look.ledger
        if not ledger.is_pending(
            order.action_id
        ):  # one that stands may have its machine already, and its pod runs there
            await self.see_that_somebody_waits(selling)
        if not look.wants(order.action_id):
            second = int(self._now().timestamp())
            ledger = ledger.without_order(order.action_id).with_order(order.action_id, note_of(order, second))
        if ledger != look.ledger or look.pool.gpu_limit != look.due(ledger, selling.gpu_count):
            await self._write(look, ledger, look.due(ledger, selling.gpu_count))
        return None

    async def begin_withdrawal(self, selling: Selling, order: Order) -> None:
        """Lower the limit by the order, which stands until `withdraw`, for a claim that comes all the same.

        A claim without a machine is deleted. Raises TransientError where it has one, and as `step`.
        """
        await self._in_turn(selling.name, lambda: self._begin_withdrawal(selling, order))

    async def _begin_withdrawal(self, selling: Selling, order: Order) -> None:
        look = await self._look(selling, order.action_id)
        claim = look.claim_of(order.action_id)
        if claim is not None and claim.status.provider_id:
            raise TransientError(f"NodePool {selling.name} made {claim.metadata.name} all the same; looked at again")
        if claim is not None:
            self._ending[selling.name] |= {claim.metadata.name}
            look = msgspec.structs.replace(look, ending=look.ending | {claim.metadata.name})
            if look.problem(self._installation, selling.gpu_count) is not None:
                await self._kube.remove(CLAIMS, claim)
        self._see_problem(look, selling)
        note = note_of(order, int(self._now().timestamp()), is_withdrawing=True)
        ledger = look.ledger.without_order(order.action_id).with_order(order.action_id, note)
        await self._write(look, ledger, look.due(ledger, selling.gpu_count))
        if claim is not None:
            await self._kube.remove(CLAIMS, claim)

    async def withdraw(self, selling: Selling, order: Order) -> None:
        """Forget the order, and read that back. Raises TransientError where a claim came all the same; as `step`."""
        due, after = await self._in_turn(selling.name, lambda: self._withdraw(selling, order))
        if after.gpu_limit != due:
            raise TransientError(f"NodePool {selling.name} still allows {after.gpu_limit} GPUs; asked again")

    async def _withdraw(self, selling: Selling, order: Order) -> tuple[int, NodePool]:
        look = await self._look(selling, order.action_id)
        claim = look.claim_of(order.action_id)
        if claim is not None and (claim.metadata.deletion_timestamp is None or claim.status.provider_id):
            raise TransientError(f"NodePool {selling.name} made {claim.metadata.name} all the same; looked at again")
        self._see_problem(look, selling)
        ledger = look.ledger.without_order(order.action_id)
        due = look.due(ledger, selling.gpu_count)
        await self._write(look, ledger, due)
        return due, await self.read(selling.name)

    # ---- going down

    async def keep(self) -> None:
        """Give newcomers to their orders, and lower the limits of pools that lost claims. Raises TransientError."""
        for selling in await self.selling():
            await self._settle(selling)

    async def end(self, claim: NodeClaim) -> None:
        """Have Karpenter make no successor of a claim that is about to be deleted. Raises TransientError."""
        name = claim.metadata.labels.get(NODE_POOL, "")
        for selling in await self.selling() if name in self.names else ():
            if selling.name == name:
                self._ending[name] |= {claim.metadata.name}
                await self._settle(selling)

    async def _settle(self, selling: Selling) -> None:
        await self._in_turn(selling.name, lambda: self._lower(selling))

    async def _lower(self, selling: Selling) -> None:
        look = await self._look(selling, "")
        if look.pool.metadata.annotations.get(OWNER) is None:
            return
        if (problem := look.problem(self._installation, selling.gpu_count)) is not None:
            self._tell(selling.name, "limits", problem[1])
            return
        self._told.pop((selling.name, "limits"), None)
        due = look.due(look.ledger, selling.gpu_count)
        if (look.pool.gpu_limit or 0) > due:
            await self._write(look, look.ledger, due)

    # ---- reading and writing one pool

    async def _in_turn(self, name: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what the attempt does, made anew where the pool was changed under way. Raises TransientError where it
        always is."""
        async with self._turns[name]:
            for _ in range(WRITE_TRIES_MAX):
                with contextlib.suppress(Conflict):
                    return await attempt()
        raise TransientError(f"NodePool {name} changes all the time; looked at again")

    async def _look(self, selling: Selling, asked: str) -> Look:
        """Return the pool as it is; newcomers carry the labels of their orders, and are struck off."""
        name = selling.name
        for _ in range(WRITE_TRIES_MAX):
            pool = await self.read(name)
            claims = await self._all(CLAIMS, {"labelSelector": f"{NODE_POOL}={name}"})
            now = self._now().timestamp()
            look = look_at(pool, claims, self._installation, now, self._ending[name], asked)
            self._ending[name] = look.ending
            if not look.newly_assigned:
                return look
            if look.problem(self._installation, selling.gpu_count) is not None:
                assigned = {one: order for one, order in look.ledger.assigned.items() if one not in look.newly_assigned}
                return msgspec.structs.replace(
                    look, ledger=msgspec.structs.replace(look.ledger, assigned=assigned), newly_assigned={}
                )
            try:
                for member, (action_id, note) in look.newly_assigned.items():
                    await self._mark(look.claims[member], action_id, note, selling.offer)
                await self._write(look, look.ledger, None)
            except (Conflict, NotFound):
                continue  # Karpenter was at it as well
        raise TransientError(f"NodePool {name} changes all the time; looked at again")

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
        if claim.status.node_name:  # Karpenter has given it the claim's labels of before
            with contextlib.suppress(NotFound):
                await self._kube.patch_node(claim.status.node_name, {"metadata": {"labels": marks}})

    async def _write(self, look: Look, ledger: Ledger, gpu_limit: int | None) -> NodePool:
        """Have the pool remember it and allow so many GPUs (None: as it does), unless it was changed meanwhile. Raises
        Conflict."""
        bare = msgspec.structs.replace(
            ledger, assigned={}, foreign_members=ledger.foreign_members & frozenset(look.claims)
        )
        texts = bare.encode(ORDERS_LENGTH_MAX, 1, ())
        metadata = look.pool.metadata
        if texts is None:
            raise _refused("LedgerFull", f"the annotation of NodePool {metadata.name} holds no more orders")
        notes: dict[str, str] = {OWNER: self._installation, ORDERS: "".join(texts)}
        spec = {}
        if gpu_limit is not None:
            notes[WRITTEN] = str(gpu_limit)
            spec = {"spec": {"limits": {GPU_RESOURCE: str(gpu_limit)}}}
        patch = {"metadata": {"resourceVersion": metadata.resource_version, "annotations": notes}, **spec}
        return await self._kube.change(POOLS, "", metadata.name, patch)

    async def _all(self, kind: Kind[ObjectT], query: dict[str, str]) -> list[ObjectT]:
        found: list[ObjectT] = []
        while True:
            page = await self._kube.list_page(kind, query)
            found += [kind.decode(item, "list") for item in page.items or ()]
            if not page.metadata.continue_:
                return found
            query = {**query, "continue": page.metadata.continue_}

    def _see_problem(self, look: Look, selling: Selling) -> None:
        if (problem := look.problem(self._installation, selling.gpu_count)) is not None:
            self._tell(selling.name, "limits", problem[1])
            raise _refused(*problem)

    def _tell(self, name: str, about: str, sentence: str) -> None:
        if self._told.get((name, about)) != sentence:
            log.warning("a node pool is left untouched", node_pool=name, reason=sentence)
        self._told[name, about] = sentence


def _refused(code: str, sentence: str) -> LaunchRefused:
    return LaunchRefused(f"{code}: {sentence}", code=code, kind="configuration", scope="offer")
