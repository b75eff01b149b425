"""What a provider of capacity does. Every implementation passes `tests/contract/provider`.

A provider chooses nothing: the order names the offer and carries the token. It keeps no state worth saving.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal, Protocol, runtime_checkable

import msgspec

from gpu_autoscaler.events.node import InstanceState
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.scheduling import Taint

RefusalScope = Literal["offer", "zone", "region"]
# capacity: none is left here now · quota: ours is used up · permission, configuration: somebody has to change something
RefusalKind = Literal["capacity", "quota", "permission", "configuration"]
# Until the next try, cluster time. Capacity: as long as Karpenter leaves such an offer alone (karpenter-provider-aws,
# pkg/cache); the rest waits for people, and is looked at again as often as CHECKLIST has quotas rechecked.
RETRY_AFTER_SECONDS: Mapping[RefusalKind, float] = {
    "capacity": 180.0,
    "quota": 600.0,
    "permission": 600.0,
    "configuration": 600.0,
}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One node to be made. Ordering it again with the same `action_id` returns the same instance."""

    action_id: ActionId
    installation: str  # UID of the kube-system namespace: whose instance it is
    pool: str
    offer: Offer
    labels: tuple[tuple[str, str], ...]
    taints: tuple[Taint, ...]


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as the cloud shows it."""

    provider_id: ProviderId
    action_id: ActionId | None  # None: its tag could not be read
    state: InstanceState
    instance_type: str
    zone: str
    capacity_type: CapacityType
    price_micro_usd_per_hour: int | None
    launched_at: Instant
    terminated_at: Instant | None = None


def instance_from_order(
    order: Order, provider_id: ProviderId, *, launched_at: datetime, state: InstanceState = "pending"
) -> Instance:
    """Return an instance of which the cloud shows nothing (yet, or any more): what its order says, and no more."""
    offer = order.offer
    return Instance(
        provider_id=provider_id,
        action_id=order.action_id,
        state=state,
        instance_type=offer.instance_type,
        zone=offer.zone,
        capacity_type=offer.capacity_type,
        price_micro_usd_per_hour=offer.price_micro_usd_per_hour,
        launched_at=launched_at,
    )


class LaunchRefused(PermanentError):
    """The cloud will not make this instance now; nothing was made. `retry_after_seconds` is cluster time."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        scope: RefusalScope,
        kind: RefusalKind = "capacity",
        retry_after_seconds: float | None = None,
    ) -> None:
        """`code` is the cloud's own word. Without a wait it is the usual one of the kind."""
        super().__init__(message)
        self.code = code
        self.scope = scope
        self.kind = kind
        self.retry_after_seconds = RETRY_AFTER_SECONDS[kind] if retry_after_seconds is None else retry_after_seconds


def verify_order(made: Instance, order: Order) -> Instance:
    """Return it if it is what was ordered. Raises PermanentError for a token that has bought something else."""
    offer = order.offer
    if (made.instance_type, made.zone, made.capacity_type) != (offer.instance_type, offer.zone, offer.capacity_type):
        bought = f"{made.instance_type}/{made.zone}/{made.capacity_type}"
        raise PermanentError(f"token of {order.action_id} bought {bought} ({made.provider_id}), not {offer.key}")
    return made


@runtime_checkable
class ReplacesInstances(Protocol):
    """A cloud whose groups replace what they lose. Of one interruption there is to be one successor: ours."""

    async def detach(self, provider_id: ProviderId) -> None:
        """See that nothing replaces this instance when it goes; it stays ours. Twice is no error.

        Raises TransientError.
        """
        ...


@runtime_checkable
class DescribesInstance(Protocol):
    """A cloud that can be asked about one instance by its name. Without it nothing is ever taken for gone for good:
    Karpenter, which removes its nodes by itself."""

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        """Return this very instance as it is now; None where the cloud knows none of this name. Changes nothing.

        Raises PermanentError for an instance that is not ours, or that cannot be asked about here (another cloud,
        project, group or region), TransientError.
        """
        ...


@runtime_checkable
class LaunchesGroups(Protocol):
    """A cloud that makes several instances that are alike all at once, or none of them."""

    def can_launch_group(self, pool: str, offer: Offer) -> bool:
        """True where orders of this pool and offer can be made so. Follows from the settings alone; asks nothing."""
        ...

    async def launch_group(self, transaction: ActionId, orders: Sequence[Order]) -> Sequence[Instance]:
        """Make all of them, or return what the transaction made already; one instance an order, in their order.

        The orders differ in `action_id` alone. `transaction` is the name of one of them, maybe one that is not asked
        for any more, and makes a second try harmless: asked again with the same orders, or with some of them, it
        returns the same instances, and never makes more. Raises LaunchRefused: none of them was made. That word may
        be this transaction's last (some clouds answer a name with its first answer for ever), so whoever wants to try
        again takes another name. Raises PermanentError for a transaction that has made others, TransientError.
        """
        ...


class CapacityProvider(Protocol):
    """A cloud, as the executor and the price watcher see it. Every call has a time limit of its own.

    All methods raise TransientError when the cloud cannot be reached, throttles, or its answer is lost.
    """

    name: str

    async def offers(self) -> Sequence[Offer]:
        """Return everything that is for sale, with prices where they are known."""
        ...

    async def launch(self, order: Order) -> Instance:
        """Make the instance, or return the one that this order's token already made. Raises LaunchRefused."""
        ...

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        """End the instance; returns it as it is afterwards, None if it never was. Ending it twice is no error.

        Refuses (PermanentError) an instance that does not carry our tag.
        """
        ...

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return every instance with this installation's tag, including those terminated in the last hour."""
        ...

    async def close(self) -> None:
        """Give back connections."""
        ...
