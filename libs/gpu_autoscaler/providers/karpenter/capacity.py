"""Buys through Karpenter: an order is a NodeClaim of its own, which names type, zone and capacity type.

A claim is held by a finalizer of ours until what became of it has been read: Karpenter deletes what it cannot launch,
and what has ended, and the claim's name would be free to buy again. For an hour after its end it stands for the used
token; then it goes. One that somebody else deleted, who waits for it, goes as soon as its order can not come again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

import structlog

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import Conflict, NotFound
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.labels import INSTALLATION
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.karpenter.catalog import Shelf
from gpu_autoscaler.providers.karpenter.classes import Classes
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions, node_class_of, validate_options
from gpu_autoscaler.providers.karpenter.overlays import NO_POOL, Overlays
from gpu_autoscaler.providers.karpenter.preflight import Preflight
from gpu_autoscaler.providers.karpenter.translate import (
    ENDS_AT,
    HELD,
    INSUFFICIENT,
    OFFER,
    claim_of,
    ended_at,
    failure_of,
    instance_of,
    is_ended_by_us,
    name_of,
    refused,
    state_of,
    unwanted,
)
from gpu_autoscaler.providers.karpenter.wire import CLAIMS, KARPENTER_FINALIZER, NodeClaim
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order

SHOWN_AFTER_END = timedelta(hours=1)
# Of a claim that others deleted: long enough to be listed, and to be asked for once more by an order that was under way
# when we started. `kubectl delete nodeclaim` waits for it.
SHOWN_AFTER_OTHERS_END = timedelta(minutes=1)
# A claim that nobody waits for any more, and that has no instance. Karpenter itself gives up after five minutes.
FORSAKEN_AFTER = timedelta(minutes=10)
LET_GO_COUNT_MAX = 50  # claims a list: the rest goes with the next ones
LOOK_SECONDS, LOOK_SECONDS_MAX = 0.1, 1.0
EVENT_SECONDS_MAX = 2.0  # Karpenter publishes its events beside what it does
FAILING_SECONDS = 4.0  # a launch that fails is tried again by Karpenter after 1, 2 and 4 seconds
WITHDRAWN_SECONDS_MAX = 10.0  # until Karpenter has seen that a claim is taken back

log = structlog.get_logger()


@contextlib.contextmanager
def asked_again() -> Iterator[None]:
    """What we may not do now, somebody may grant: nothing but a launch is given up for it."""
    try:
        yield
    except PermanentError as exc:
        raise TransientError(f"{exc}; asked again") from exc


def wall_clock() -> datetime:
    """Now, where no other time is told."""
    return datetime.now(UTC)


class KarpenterCapacity:
    """The NodeClaims of one installation."""

    name = "karpenter"

    def __init__(
        self,
        options: KarpenterOptions,
        connection: Connection,
        *,
        installation: str,
        now: Callable[[], datetime] = wall_clock,
    ) -> None:
        """Raises ConfigError with everything that is missing."""
        validate_options(options)
        self._options = options
        self._installation = installation
        self._now = now
        self._kube = KubeClient(connection, now=now)
        self._shelf = Shelf(str(options.offers_path))
        self._classes = Classes(self._kube, node_class_of(options))
        self._overlays = Overlays(self._kube)
        self._names: dict[ProviderId, str] = {}  # of claims that were seen
        self._listing_since: datetime | None = None

    async def offers(self) -> Sequence[Offer]:
        """Return what the file says, under NodeOverlays. Raises TransientError where Karpenter's kinds are not to be
        seen."""
        with contextlib.suppress(PermanentError):  # we may not look at the class; what is sold is known all the same
            await self._classes.read()
        return await self._overlays.over(self._shelf, NO_POOL)

    async def launch(self, order: Order) -> Instance:
        """Make the claim, or find the one of this token, and wait for its instance.

        Raises LaunchRefused when nothing was made, PermanentError for a token that bought something else,
        TransientError: the same token asks again.
        """
        try:
            claim = await self._found(name_of(order)) or await self._made(order)
        except LaunchRefused:
            raise
        except PermanentError as exc:
            raise unwanted(exc) from exc
        if (bought := claim.metadata.annotations.get(OFFER)) != order.offer.key:
            raise PermanentError(
                f"token of {order.action_id} bought {bought} ({claim.metadata.name}), not {order.offer.key}"
            )
        return await self._instance(claim.metadata.name)

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        """Begin the instance's end; None if it never was. Raises PermanentError if it is not ours, TransientError."""
        with asked_again():
            claim = await self._of(provider_id)
        if claim is None:
            return None
        owner = claim.metadata.labels.get(INSTALLATION)
        if owner != self._installation:
            raise PermanentError(
                f"{provider_id} ({claim.metadata.name}) carries the label of {owner!r}, not ours: left untouched"
            )
        if claim.metadata.deletion_timestamp is None:
            with asked_again():
                claim = await self._end(claim, now)
        return None if claim is None else instance_of(claim)

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return the instances of an installation, those of an hour after their end too. Raises TransientError."""
        with asked_again():
            claims = await self._listed({"labelSelector": f"{INSTALLATION}={installation}"})
        now = self._now()
        self._listing_since = self._listing_since or now
        shown, over = [], []
        for claim in claims:
            if not claim.status.provider_id:
                if self._is_forsaken(claim, now):
                    over.append(claim)
            elif state_of(claim) == "terminated" and self._is_shown_no_more(claim, now):
                over.append(claim)
            else:
                shown.append(instance_of(claim))
        self._names = {
            ProviderId(claim.status.provider_id): claim.metadata.name for claim in claims if claim.status.provider_id
        }
        with asked_again():
            for claim in over[:LET_GO_COUNT_MAX]:
                await self._let_go(claim)
        return shown

    async def preflight(self) -> Sequence[Finding]:
        """Return what is right and wrong with cluster, rights, class and settings. Makes nothing."""
        node_class = node_class_of(self._options)
        return await Preflight(self._kube, node_class, self._shelf, self._installation).findings()

    async def close(self) -> None:
        """Give back connections."""
        await self._kube.close()

    # ---- one claim

    async def _found(self, name: str) -> NodeClaim | None:
        try:
            return await self._kube.get(CLAIMS, "", name)
        except NotFound:
            return None

    async def _made(self, order: Order) -> NodeClaim:
        """Make the claim. What is known to be in vain is refused before it is asked for."""
        if (lacking := await self._classes.lacking()) is not None:
            raise LaunchRefused(f"{lacking[0]}: {lacking[1]}", code=lacking[0], kind="configuration", scope="offer")
        sold = next((offer for offer in self._shelf.offers() if offer.key == order.offer.key), order.offer)
        claim = claim_of(order, node_class_of(self._options), sold.resources.gpu_count)
        try:
            return await self._kube.make(CLAIMS, "", claim)
        except Conflict:
            return await self._kube.get(CLAIMS, "", name_of(order))  # another try of the same order was first
        except NotFound as exc:
            raise TransientError(
                f"{exc}; Karpenter's NodeClaims are not installed, see `gpu-autoscaler doctor`"
            ) from exc

    async def _end(self, claim: NodeClaim, now: datetime) -> NodeClaim | None:
        """Delete the claim, and say that nothing is to be waited for: whoever ends a node has emptied it before.

        Karpenter would wait without a limit for pods that it may not evict.
        """
        name, note = claim.metadata.name, {ENDS_AT: now.strftime("%Y-%m-%dT%H:%M:%SZ")}
        with contextlib.suppress(NotFound, Conflict):  # gone, or another of that name
            await self._kube.change(CLAIMS, "", name, {"metadata": {"uid": claim.metadata.uid, "annotations": note}})
        await self._kube.remove(CLAIMS, claim)
        return await self._found(name)

    async def _instance(self, name: str) -> Instance:
        """Wait until the claim has its instance, or Karpenter has said why it has none."""
        began, wait_seconds = time.monotonic(), LOOK_SECONDS
        deadline, is_withdrawn = began + self._options.launch_seconds_max, False
        while True:
            claim = await self._found(name)
            if claim is None:
                raise TransientError(f"NodeClaim {name} is gone before it was launched; it is made again")
            if claim.status.provider_id:
                self._names[ProviderId(claim.status.provider_id)] = name
                return instance_of(claim)
            if claim.metadata.deletion_timestamp is not None and KARPENTER_FINALIZER not in claim.metadata.finalizers:
                raise await self._nothing_made(claim, is_withdrawn=is_withdrawn)
            now = time.monotonic()
            is_failing = failure_of(claim) is not None and now - began >= FAILING_SECONDS
            if not is_withdrawn and (is_failing or now >= deadline):
                # Taken back, so that nothing is launched which nobody waits for.
                await self._kube.remove(CLAIMS, claim)
                deadline, is_withdrawn = now + WITHDRAWN_SECONDS_MAX, True
            elif now >= deadline:
                raise TransientError(f"NodeClaim {name} is taken back, and Karpenter has not let go of it yet")
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(wait_seconds * 1.5, LOOK_SECONDS_MAX)

    async def _nothing_made(self, claim: NodeClaim, *, is_withdrawn: bool) -> AutoscalerError:
        """Let go of a claim that came to nothing, and return why it did."""
        name, failure = claim.metadata.name, failure_of(claim)
        if failure is None and is_withdrawn:
            await self._let_go(claim)
            return TransientError(
                f"NodeClaim {name}: no word of Karpenter in {self._options.launch_seconds_max:g} s; does it run, and is"
                f" {self._options.node_class} of its cloud? The claim is taken back, and made again"
            )
        reason, message = failure or await self._event_of(name)
        await self._let_go(claim)
        return refused(name, reason, message)

    async def _event_of(self, name: str) -> tuple[str, str]:
        """Return why Karpenter deleted a claim: it stands in an event, or in the class, and not in the claim."""
        if (lacking := await self._classes.lacking()) is not None:
            return lacking
        deadline = time.monotonic() + EVENT_SECONDS_MAX
        while True:
            try:
                if (said := await self._classes.event_of(name)) is not None:
                    return said
            except PermanentError as exc:  # we may not read events: that it was deleted is known all the same
                return INSUFFICIENT, f"deleted before it was launched; why is not to be read: {exc}"
            if time.monotonic() >= deadline:
                return INSUFFICIENT, "deleted before it was launched; there is no event that says why"
            await asyncio.sleep(LOOK_SECONDS)

    async def _of(self, provider_id: ProviderId) -> NodeClaim | None:
        """The claim of an instance, whosever it is."""
        name = self._names.get(provider_id)
        if name is not None:
            claim = await self._found(name)
            if claim is not None and claim.status.provider_id == provider_id:
                return claim
        found = (claim for claim in await self._listed({}) if claim.status.provider_id == provider_id)
        return next(found, None)

    async def _listed(self, query: dict[str, str]) -> list[NodeClaim]:
        claims: list[NodeClaim] = []
        while True:
            try:
                page = await self._kube.list_page(CLAIMS, query)
            except NotFound as exc:
                raise TransientError(f"{exc}; Karpenter's NodeClaims are not installed") from exc
            claims += [CLAIMS.decode(item, "list") for item in page.items or ()]
            if not page.metadata.continue_:
                return claims
            query = {**query, "continue": page.metadata.continue_}

    def _is_shown_no_more(self, claim: NodeClaim, now: datetime) -> bool:
        """Ended long enough ago that no order asks for it any more."""
        if is_ended_by_us(claim):
            return now - ended_at(claim) > SHOWN_AFTER_END
        listing_since = self._listing_since or now
        return min(now - ended_at(claim), now - listing_since) > SHOWN_AFTER_OTHERS_END and self._is_forsaken(
            claim, now
        )

    def _is_forsaken(self, claim: NodeClaim, now: datetime) -> bool:
        """Without an instance, for longer than anybody waits for it."""
        return now - claim.created_at > FORSAKEN_AFTER

    async def _let_go(self, claim: NodeClaim) -> None:
        """Delete it where nobody has, and take our finalizer off. Others' stay; who was first is no matter."""
        if claim.metadata.deletion_timestamp is None:
            await self._kube.remove(CLAIMS, claim)
            return  # Karpenter ends what it may have made in this moment; the rest is for the next list
        others = [finalizer for finalizer in claim.metadata.finalizers if finalizer != HELD]
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
            log.debug("node claim changed under way, seen to later", node_claim=claim.metadata.name, error=str(exc))
