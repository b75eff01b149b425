"""Buys through NodePools whose limits are ours (`karpenter.mode = "limits"`): an order allows one machine more, and
Karpenter makes it for a pod that waits."""

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import Conflict, NotFound
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.karpenter.capacity import (
    FAILING_SECONDS,
    LOOK_SECONDS,
    LOOK_SECONDS_MAX,
    KarpenterCapacity,
    asked_again,
    wall_clock,
)
from gpu_autoscaler.providers.karpenter.limits import WRITE_TRIES_MAX, LimitedPools, Selling
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions, node_class_of
from gpu_autoscaler.providers.karpenter.preflight import Preflight
from gpu_autoscaler.providers.karpenter.translate import HELD, OFFER, failure_of, instance_of, refused, unwanted
from gpu_autoscaler.providers.karpenter.wire import CLAIMS, NodeClaim
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order

# Karpenter may have seen the limit of before while it was lowered: its claim is there by then. Source: our own.
SETTLE_SECONDS = 1.0


class LimitedCapacity(KarpenterCapacity):
    """The NodePools of one installation, one machine type each."""

    def __init__(
        self,
        options: KarpenterOptions,
        connection: Connection,
        *,
        installation: str,
        now: Callable[[], datetime] = wall_clock,
    ) -> None:
        """Raises ConfigError with everything that is missing."""
        super().__init__(options, connection, installation=installation, now=now)
        self._pools = LimitedPools(self._kube, options, self._shelf, installation, now)

    async def offers(self) -> Sequence[Offer]:
        """Return what the pools make, under NodeOverlays; one whose machines an overlay gives GPUs is left out, as its
        limit would count others than we do. Raises TransientError."""
        with asked_again():
            selling = await self._pools.selling()
        found: dict[str, Offer] = {}
        for one in selling:
            for offer in await self._overlays.over(self._shelf, one.pool.labels):
                if offer.key == one.offer.key and offer.resources.gpus == one.offer.resources.gpus:
                    found.setdefault(offer.key, offer)
        return tuple(found[key] for key in sorted(found))

    async def launch(self, order: Order) -> Instance:
        """Allow one machine more, and wait for the one that Karpenter makes of it; or find that of this token.

        Raises as `KarpenterCapacity.launch`: what is refused is taken back before, and read back.
        """
        try:
            claim = await self._made_before(order) or await self._bought(order)
        except (LaunchRefused, _OfAnotherError):
            raise
        except PermanentError as exc:
            raise unwanted(exc) from exc
        return instance_of(claim)

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return the instances; limits of pools that lost some are lowered before. Raises TransientError."""
        with asked_again():
            await self._pools.keep()
        return await super().instances(installation)

    async def preflight(self) -> Sequence[Finding]:
        """Return what is right and wrong with cluster, rights, pools and settings. Makes nothing."""
        examination = Preflight(self._kube, node_class_of(self._options), self._shelf, self._installation, self._pools)
        return await examination.findings()

    async def _end(self, claim: NodeClaim, now: datetime) -> NodeClaim | None:
        """The limit goes down first, so that Karpenter makes no successor."""
        await self._pools.end(claim)
        return await super()._end(claim, now)

    # ---- one order

    async def _made_before(self, order: Order) -> NodeClaim | None:
        """The claim of this token, ended ones of an hour too. Raises PermanentError where it is of another offer."""
        asked = f"{labels.INSTALLATION}={order.installation},{labels.ACTION_ID}={order.action_id}"
        for claim in await self._listed({"labelSelector": asked}):
            if claim.status.provider_id:
                if (bought := claim.metadata.annotations.get(OFFER)) != order.offer.key:
                    raise _OfAnotherError(
                        f"token of {order.action_id} bought {bought} ({claim.metadata.name}), not {order.offer.key}"
                    )
                return await self._held(claim)
        return None

    async def _bought(self, order: Order) -> NodeClaim:
        selling = await self._pools.for_order(order)
        began, wait_seconds = time.monotonic(), LOOK_SECONDS
        named = None  # the claim, once there was one
        while True:
            claim = await self._pools.step(selling, order) if named is None else await self._found(named)
            if claim is not None and claim.status.provider_id:
                return await self._held(claim)
            seconds = time.monotonic() - began
            is_failing = claim is not None and failure_of(claim) is not None and seconds >= FAILING_SECONDS
            is_gone = named is not None and (claim is None or claim.metadata.deletion_timestamp is not None)
            if is_failing or is_gone or seconds >= self._options.launch_seconds_max:
                raise await self._withdrawn(selling, order, claim, named)
            named = named or (None if claim is None else claim.metadata.name)
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(wait_seconds * 1.5, LOOK_SECONDS_MAX)

    async def _withdrawn(
        self, selling: Selling, order: Order, claim: NodeClaim | None, named: str | None
    ) -> LaunchRefused:
        """Take the order back, and return why it came to nothing. Raises TransientError where a machine came."""
        said = None if claim is None else failure_of(claim)
        await self._pools.begin_withdrawal(selling, order)
        await asyncio.sleep(SETTLE_SECONDS)
        await self._pools.withdraw(selling, order)
        if named is not None:
            return refused(named, *(said or await self._event_of(named)))
        return LaunchRefused(
            f"NothingMade: Karpenter has made nothing of NodePool {selling.name} in"
            f" {self._options.launch_seconds_max:g} s:"
            " does it run, is the pool ready, and does a pod wait that tolerates its taints and fits its machines?",
            code="NothingMade",
            scope="offer",
        )

    async def _held(self, claim: NodeClaim) -> NodeClaim:
        """Put our finalizer on a claim with a machine, so that it stands for the used token. Not before: Karpenter
        plans nothing while a claim without one is there."""
        for _ in range(WRITE_TRIES_MAX):
            metadata = claim.metadata
            if HELD in metadata.finalizers or metadata.deletion_timestamp is not None:
                return claim
            patch = {
                "uid": metadata.uid,
                "resourceVersion": metadata.resource_version,
                "finalizers": [*metadata.finalizers, HELD],
            }
            try:
                return await self._kube.change(CLAIMS, "", metadata.name, {"metadata": patch})
            except (Conflict, NotFound):  # Karpenter was at it as well
                claim = await self._found(metadata.name) or claim
        raise TransientError(f"NodeClaim {claim.metadata.name} changes all the time; looked at again")


class _OfAnotherError(PermanentError):
    """A token that bought something else."""
