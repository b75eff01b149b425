"""Karpenter driver with `karpenter.mode = "limits"`: an order raises a NodePool's limit by one machine, and Karpenter
launches it for a pending pod."""

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
    POLL_SECONDS,
    POLL_SECONDS_MAX,
    KarpenterCapacity,
    retried,
)
from gpu_autoscaler.providers.karpenter.limits import WRITE_TRIES_MAX, LimitedNodePools, Selling
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions, node_class_of
from gpu_autoscaler.providers.karpenter.preflight import Preflight
from gpu_autoscaler.providers.karpenter.translate import FINALIZER, OFFER, failure_of, instance_of, refused, rejected
from gpu_autoscaler.providers.karpenter.wire import CLAIMS, NodeClaim
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, wall_clock

# Karpenter may still act on the previous limit; its claim exists after this time. Source: our own.
SETTLE_SECONDS = 1.0


class LimitsModeCapacity(KarpenterCapacity):
    """NodePools of one installation, one machine type each."""

    def __init__(
        self,
        options: KarpenterOptions,
        connection: Connection,
        *,
        installation: str,
        now: Callable[[], datetime] = wall_clock,
    ) -> None:
        """Raises ConfigError with all violations."""
        super().__init__(options, connection, installation=installation, now=now)
        self._pools = LimitedNodePools(self._kube, options, self._catalog, installation, now)

    async def offers(self) -> Sequence[Offer]:
        """Return the offers of the pools, with NodeOverlays applied. Raises TransientError. Pools whose GPU count an
        overlay changes are left out, as their limit would count other GPUs."""
        with retried():
            selling = await self._pools.selling()
        offers: dict[str, Offer] = {}
        for pool_offer in selling:
            for offer in await self._overlays.apply_to(self._catalog, pool_offer.pool.labels):
                if offer.key == pool_offer.offer.key and offer.resources.gpus == pool_offer.offer.resources.gpus:
                    offers.setdefault(offer.key, offer)
        return tuple(offers[key] for key in sorted(offers))

    async def launch(self, order: Order) -> Instance:
        """Raise the limit by one machine and wait for the one that Karpenter launches; or find the token's. Raises as
        `KarpenterCapacity.launch`; a refused order is withdrawn and read back before."""
        try:
            claim = await self._find_launched(order) or await self._launch(order)
        except (LaunchRefused, _OtherOfferError):
            raise
        except PermanentError as exc:
            raise rejected(exc) from exc
        return instance_of(claim)

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return the instances, after lowering limits of pools that lost some. Raises TransientError."""
        with retried():
            await self._pools.settle_all()
        return await super().instances(installation)

    async def preflight(self) -> Sequence[Finding]:
        preflight = Preflight(self._kube, node_class_of(self._options), self._catalog, self._installation, self._pools)
        return await preflight.findings()

    async def _terminate(self, claim: NodeClaim, now: datetime) -> NodeClaim | None:
        """Lower the limit before the claim is deleted, so that Karpenter launches no successor."""
        await self._pools.before_termination(claim)
        return await super()._terminate(claim, now)

    # ---- one order

    async def _find_launched(self, order: Order) -> NodeClaim | None:
        """Return the token's claim, for an hour after its end too. Raises PermanentError if it has another offer."""
        selector = f"{labels.INSTALLATION}={order.installation},{labels.ACTION_ID}={order.action_id}"
        for claim in await self._listed({"labelSelector": selector}):
            if claim.status.provider_id:
                if (bought := claim.metadata.annotations.get(OFFER)) != order.offer.key:
                    raise _OtherOfferError(
                        f"token of {order.action_id} bought {bought} ({claim.metadata.name}), not {order.offer.key}"
                    )
                return await self._hold(claim)
        return None

    async def _launch(self, order: Order) -> NodeClaim:
        selling = await self._pools.for_order(order)
        began, wait_seconds = time.monotonic(), POLL_SECONDS
        claim_name = None  # set once there is a claim
        while True:
            claim = await self._pools.advance(selling, order) if claim_name is None else await self._find(claim_name)
            if claim is not None and claim.status.provider_id:
                return await self._hold(claim)
            seconds = time.monotonic() - began
            is_failing = claim is not None and failure_of(claim) is not None and seconds >= FAILING_SECONDS
            is_gone = claim_name is not None and (claim is None or claim.metadata.deletion_timestamp is not None)
            if is_failing or is_gone or seconds >= self._options.launch_seconds_max:
                raise await self._withdraw(selling, order, claim, claim_name)
            claim_name = claim_name or (None if claim is None else claim.metadata.name)
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(wait_seconds * 1.5, POLL_SECONDS_MAX)

    async def _withdraw(
        self, selling: Selling, order: Order, claim: NodeClaim | None, claim_name: str | None
    ) -> LaunchRefused:
        """Withdraw the order and return why it failed. Raises TransientError if a machine was launched."""
        failure = None if claim is None else failure_of(claim)
        await self._pools.begin_withdrawal(selling, order)
        await asyncio.sleep(SETTLE_SECONDS)
        await self._pools.withdraw(selling, order)
        if claim_name is not None:
            return refused(claim_name, *(failure or await self._event_of(claim_name)))
        return LaunchRefused(
            f"NothingLaunched: Karpenter launched nothing of NodePool {selling.name} within"
            f" {self._options.launch_seconds_max:g} s; check that it runs, that the pool is ready, and that a pending"
            " pod tolerates its taints and fits its machines",
            code="NothingLaunched",
            scope="offer",
        )

    async def _hold(self, claim: NodeClaim) -> NodeClaim:
        """Put our finalizer on a claim with a machine, so that it represents the used token. Not before: Karpenter does
        not provision while a claim without machine exists."""
        for _ in range(WRITE_TRIES_MAX):
            metadata = claim.metadata
            if FINALIZER in metadata.finalizers or metadata.deletion_timestamp is not None:
                return claim
            patch = {
                "uid": metadata.uid,
                "resourceVersion": metadata.resource_version,
                "finalizers": [*metadata.finalizers, FINALIZER],
            }
            try:
                return await self._kube.change(CLAIMS, "", metadata.name, {"metadata": patch})
            except (Conflict, NotFound):  # Karpenter changed it too
                claim = await self._find(metadata.name) or claim
        raise TransientError(f"NodeClaim {claim.metadata.name} changes constantly; retried")


class _OtherOfferError(PermanentError):
    """A token that bought another offer."""
