"""Karpenter driver: an order is a NodeClaim of its own, with instance type, zone and capacity type.

Our finalizer holds a claim until its outcome has been read: Karpenter deletes claims that it cannot launch or that have
ended, and the claim's name would be free to launch again. For an hour after its end the claim represents the used
token, then it is released. A claim deleted by somebody else is released as soon as its order cannot be retried, because
`kubectl delete` waits for it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import Conflict, NotFound
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.labels import INSTALLATION
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.karpenter.catalog import Catalog
from gpu_autoscaler.providers.karpenter.classes import NodeClasses
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions, node_class_of, validate_options
from gpu_autoscaler.providers.karpenter.overlays import NO_POOL, Overlays
from gpu_autoscaler.providers.karpenter.preflight import Preflight
from gpu_autoscaler.providers.karpenter.translate import (
    ENDS_AT,
    FINALIZER,
    INSUFFICIENT,
    OFFER,
    claim_of,
    ended_at,
    failure_of,
    instance_of,
    is_ended_by_us,
    name_of,
    refused,
    rejected,
    state_of,
)
from gpu_autoscaler.providers.karpenter.wire import CLAIMS, KARPENTER_FINALIZER, NodeClaim
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, misconfigured, wall_clock

SHOWN_AFTER_END = timedelta(hours=1)
# Claims deleted by others: long enough to be listed, and for one more retry of an order in progress when we started.
# `kubectl delete nodeclaim` waits for it.
SHOWN_AFTER_OTHERS_END = timedelta(minutes=1)
# A claim without instance that nobody waits for any more. Karpenter itself gives up after five minutes.
ABANDONED_AFTER = timedelta(minutes=10)
RELEASED_MAX = 50  # claims per list; the rest follows with the next ones
POLL_SECONDS, POLL_SECONDS_MAX = 0.1, 1.0
EVENT_SECONDS_MAX = 2.0  # Karpenter publishes events asynchronously
FAILING_SECONDS = 4.0  # Karpenter retries a failing launch after 1, 2 and 4 seconds
WITHDRAWN_SECONDS_MAX = 10.0  # until Karpenter has processed the deletion of a claim

log = structlog.get_logger()


@contextlib.contextmanager
def retried() -> Iterator[None]:
    """Turn a PermanentError into a TransientError: missing permissions may be granted. Not for launches."""
    try:
        yield
    except PermanentError as exc:
        raise TransientError(f"{exc}; retried") from exc


class KarpenterCapacity:
    """NodeClaims of one installation."""

    name = "karpenter"

    def __init__(
        self,
        options: KarpenterOptions,
        connection: Connection,
        *,
        installation: str,
        now: Callable[[], datetime] = wall_clock,
    ) -> None:
        """Raises ConfigError with all violations."""
        validate_options(options)
        self._options = options
        self._installation = installation
        self._now = now
        self._kube = KubeClient(connection, now=now)
        self._catalog = Catalog(str(options.offers_path))
        self._classes = NodeClasses(self._kube, node_class_of(options))
        self._overlays = Overlays(self._kube)
        self._names: dict[ProviderId, str] = {}  # of claims seen
        self._listing_since: datetime | None = None

    async def offers(self) -> Sequence[Offer]:
        """Return the offers of the file, with NodeOverlays applied. Raises TransientError if kinds cannot be read."""
        with contextlib.suppress(PermanentError):  # the offers are known even if the class cannot be read
            await self._classes.read()
        return await self._overlays.apply_to(self._catalog, NO_POOL)

    async def launch(self, order: Order) -> Instance:
        """Create the claim, or find the token's, and wait for its instance. Raises LaunchRefused when nothing was
        launched, PermanentError for a token that bought something else, TransientError: retried with the same token."""
        try:
            claim = await self._find(name_of(order)) or await self._create(order)
        except LaunchRefused:
            raise
        except PermanentError as exc:
            raise rejected(exc) from exc
        if (bought := claim.metadata.annotations.get(OFFER)) != order.offer.key:
            raise PermanentError(
                f"token of {order.action_id} bought {bought} ({claim.metadata.name}), not {order.offer.key}"
            )
        return await self._instance(claim.metadata.name)

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        """Delete the claim; None if it never existed. Raises PermanentError if it is not ours, TransientError."""
        with retried():
            claim = await self._by_provider_id(provider_id)
        if claim is None:
            return None
        owner = claim.metadata.labels.get(INSTALLATION)
        if owner != self._installation:
            raise PermanentError(
                f"{provider_id} ({claim.metadata.name}) carries the label of {owner!r}, not ours: left untouched"
            )
        if claim.metadata.deletion_timestamp is None:
            with retried():
                claim = await self._terminate(claim, now)
        return None if claim is None else instance_of(claim)

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return an installation's instances, for an hour after their end too. Raises TransientError."""
        with retried():
            claims = await self._listed({"labelSelector": f"{INSTALLATION}={installation}"})
        now = self._now()
        self._listing_since = self._listing_since or now
        instances, expired = [], []
        for claim in claims:
            if not claim.status.provider_id:
                if self._is_abandoned(claim, now):
                    expired.append(claim)
            elif state_of(claim) == "terminated" and self._is_expired(claim, now):
                expired.append(claim)
            else:
                instances.append(instance_of(claim))
        self._names = {
            ProviderId(claim.status.provider_id): claim.metadata.name for claim in claims if claim.status.provider_id
        }
        with retried():
            for claim in expired[:RELEASED_MAX]:
                await self._release(claim)
        return instances

    async def preflight(self) -> Sequence[Finding]:
        node_class = node_class_of(self._options)
        return await Preflight(self._kube, node_class, self._catalog, self._installation).findings()

    async def close(self) -> None:
        await self._kube.close()

    # ---- one claim

    async def _find(self, name: str) -> NodeClaim | None:
        try:
            return await self._kube.get(CLAIMS, "", name)
        except NotFound:
            return None

    async def _create(self, order: Order) -> NodeClaim:
        """Create the claim. Orders known to fail are refused beforehand."""
        if (problem := await self._classes.problem()) is not None:
            raise misconfigured(": ".join(problem), problem[0])
        listed = next((offer for offer in self._catalog.offers() if offer.key == order.offer.key), order.offer)
        claim = claim_of(order, node_class_of(self._options), listed.resources.gpu_count)
        try:
            return await self._kube.make(CLAIMS, "", claim)
        except Conflict:
            return await self._kube.get(CLAIMS, "", name_of(order))  # another try of the same order was first
        except NotFound as exc:
            raise TransientError(
                f"{exc}; Karpenter's NodeClaims are not installed, see `gpu-autoscaler doctor`"
            ) from exc

    async def _terminate(self, claim: NodeClaim, now: datetime) -> NodeClaim | None:
        """Delete the claim, with a termination timestamp of now: the node was drained before. Without it Karpenter
        waits without limit for pods that it may not evict."""
        name, note = claim.metadata.name, {ENDS_AT: now.strftime("%Y-%m-%dT%H:%M:%SZ")}
        with contextlib.suppress(NotFound, Conflict):  # gone, or another claim of that name
            await self._kube.change(CLAIMS, "", name, {"metadata": {"uid": claim.metadata.uid, "annotations": note}})
        await self._kube.remove(CLAIMS, claim)
        return await self._find(name)

    async def _instance(self, name: str) -> Instance:
        """Wait until the claim has its instance, or Karpenter reports why it has none."""
        began, wait_seconds = time.monotonic(), POLL_SECONDS
        deadline, is_withdrawn = began + self._options.launch_seconds_max, False
        while True:
            claim = await self._find(name)
            if claim is None:
                raise TransientError(f"NodeClaim {name} disappeared before its launch; retried")
            if claim.status.provider_id:
                self._names[ProviderId(claim.status.provider_id)] = name
                return instance_of(claim)
            if claim.metadata.deletion_timestamp is not None and KARPENTER_FINALIZER not in claim.metadata.finalizers:
                raise await self._nothing_launched(claim, is_withdrawn=is_withdrawn)
            now = time.monotonic()
            is_failing = failure_of(claim) is not None and now - began >= FAILING_SECONDS
            if not is_withdrawn and (is_failing or now >= deadline):
                # Deleted, so that no instance is launched that nobody waits for.
                await self._kube.remove(CLAIMS, claim)
                deadline, is_withdrawn = now + WITHDRAWN_SECONDS_MAX, True
            elif now >= deadline:
                raise TransientError(f"NodeClaim {name} is deleted, and Karpenter has not released it yet; retried")
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(wait_seconds * 1.5, POLL_SECONDS_MAX)

    async def _nothing_launched(self, claim: NodeClaim, *, is_withdrawn: bool) -> AutoscalerError:
        """Release a claim without an instance, and return why it has none."""
        name, failure = claim.metadata.name, failure_of(claim)
        if failure is None and is_withdrawn:
            await self._release(claim)
            return TransientError(
                f"NodeClaim {name}: no response from Karpenter in {self._options.launch_seconds_max:g} s; check that it"
                f" runs and serves {self._options.node_class}. The claim is deleted and retried"
            )
        reason, message = failure or await self._event_of(name)
        await self._release(claim)
        return refused(name, reason, message)

    async def _event_of(self, name: str) -> tuple[str, str]:
        """Return why Karpenter deleted a claim: from the class or an event, as the claim does not say it."""
        if (problem := await self._classes.problem()) is not None:
            return problem
        deadline = time.monotonic() + EVENT_SECONDS_MAX
        while True:
            try:
                if (failure := await self._classes.event_of(name)) is not None:
                    return failure
            except PermanentError as exc:  # we may not read events: that it was deleted is known all the same
                return INSUFFICIENT, f"deleted before its launch; its events cannot be read: {exc}"
            if time.monotonic() >= deadline:
                return INSUFFICIENT, "deleted before its launch; no event says why"
            await asyncio.sleep(POLL_SECONDS)

    async def _by_provider_id(self, provider_id: ProviderId) -> NodeClaim | None:
        """Return the claim of an instance, whoever owns it."""
        name = self._names.get(provider_id)
        if name is not None:
            claim = await self._find(name)
            if claim is not None and claim.status.provider_id == provider_id:
                return claim
        return next((claim for claim in await self._listed({}) if claim.status.provider_id == provider_id), None)

    async def _listed(self, query: dict[str, str]) -> list[NodeClaim]:
        try:
            return await self._kube.list_all(CLAIMS, query)
        except NotFound as exc:
            raise TransientError(f"{exc}; Karpenter's NodeClaims are not installed") from exc

    def _is_expired(self, claim: NodeClaim, now: datetime) -> bool:
        """Return whether it ended so long ago that no order can retry it."""
        if is_ended_by_us(claim):
            return now - ended_at(claim) > SHOWN_AFTER_END
        listing_since = self._listing_since or now
        return min(now - ended_at(claim), now - listing_since) > SHOWN_AFTER_OTHERS_END and self._is_abandoned(
            claim, now
        )

    def _is_abandoned(self, claim: NodeClaim, now: datetime) -> bool:
        return now - claim.created_at > ABANDONED_AFTER

    async def _release(self, claim: NodeClaim) -> None:
        """Delete it if nobody has, and remove our finalizer. Other finalizers stay."""
        if claim.metadata.deletion_timestamp is None:
            await self._kube.remove(CLAIMS, claim)
            return  # Karpenter terminates an instance it may just have launched; the next list handles the rest
        others = [finalizer for finalizer in claim.metadata.finalizers if finalizer != FINALIZER]
        if len(others) == len(claim.metadata.finalizers):
            return
        patch = {
            "metadata": {
                "uid": claim.metadata.uid,
                "resourceVersion": claim.metadata.resource_version,
                "finalizers": others,
            }
        }
        try:
            await self._kube.change(CLAIMS, "", claim.metadata.name, patch)
        except (NotFound, Conflict) as exc:
            log.debug("node claim update skipped", node_claim=claim.metadata.name, error=str(exc))
