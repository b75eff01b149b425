"""Interface of a capacity provider. Every implementation passes `tests/contract/provider`.

A provider chooses nothing: the order names the offer and carries the token. It keeps no state that must survive.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from gpu_autoscaler.events.node import InstanceState
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.scheduling import Taint

RefusalScope = Literal["offer", "zone", "region"]
# capacity: none available now · quota: exhausted · permission, configuration: somebody has to change something
RefusalKind = Literal["capacity", "quota", "permission", "configuration"]
# Until the next attempt, cluster time. Capacity: as long as Karpenter marks an offering unavailable
# (karpenter-provider-aws, pkg/cache). The rest waits for people; it is rechecked as often as quotas
# (docs/decisions.md#intervals-and-retention).
RETRY_AFTER_SECONDS: Mapping[RefusalKind, float] = {
    "capacity": 180.0,
    "quota": 600.0,
    "permission": 600.0,
    "configuration": 600.0,
}


def wall_clock() -> datetime:
    """Return the current time: the default clock of drivers."""
    return datetime.now(UTC)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Order of one node. Ordering again with the same `action_id` returns the same instance."""

    action_id: ActionId
    installation: str  # UID of the kube-system namespace: owner of the instance
    pool: str
    offer: Offer
    labels: tuple[tuple[str, str], ...]
    taints: tuple[Taint, ...]


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as the cloud reports it."""

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
    """Return the instance with the order's data, for one that the cloud does not list (yet, or any more)."""
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


OptionsT = TypeVar("OptionsT")


class CloudCapacity(ABC, Generic[OptionsT]):
    """Base of the drivers that call a cloud's API: options and clock, before the connection is opened."""

    def __init__(
        self,
        options: OptionsT,
        *,
        installation: str,
        url: str | None = None,
        call_seconds_max: float = 30.0,
        now: Callable[[], datetime] = wall_clock,
    ) -> None:
        """`url` redirects all calls to a fake. Raises ConfigError with all violations."""
        self._options = options
        self._installation = installation
        self._now = now
        self._open(url, call_seconds_max)

    @abstractmethod
    def _open(self, url: str | None, call_seconds_max: float) -> None:
        """Validate the options and open the connection. Raises ConfigError with all violations."""


class LaunchRefused(PermanentError):
    """The cloud does not launch this instance now; nothing was made. `retry_after_seconds` is cluster time."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        scope: RefusalScope,
        kind: RefusalKind = "capacity",
        retry_after_seconds: float | None = None,
    ) -> None:
        """`code` is the cloud's own. Without `retry_after_seconds` the default of the kind applies."""
        super().__init__(message)
        self.code = code
        self.scope = scope
        self.kind = kind
        self.retry_after_seconds = RETRY_AFTER_SECONDS[kind] if retry_after_seconds is None else retry_after_seconds


def misconfigured(message: str, code: str, *, scope: RefusalScope = "offer") -> LaunchRefused:
    """Return the refusal of an order that the settings, or a group's own, rule out until somebody changes them."""
    return LaunchRefused(message, code=code, kind="configuration", scope=scope)


def verify_order(instance: Instance, order: Order) -> Instance:
    """Return the instance if it is what was ordered. Raises PermanentError if the token bought something else."""
    offer = order.offer
    bought_offer = (instance.instance_type, instance.zone, instance.capacity_type)
    if bought_offer != (offer.instance_type, offer.zone, offer.capacity_type):
        bought = "/".join(bought_offer)
        raise PermanentError(f"token of {order.action_id} bought {bought} ({instance.provider_id}), not {offer.key}")
    return instance


@runtime_checkable
class ReplacesInstances(Protocol):
    """A cloud whose groups replace lost instances. An interrupted instance must have one successor: ours."""

    async def detach(self, provider_id: ProviderId) -> None:
        """Keep the group from replacing this instance when it ends; it stays ours. Idempotent. Raises
        TransientError."""


@runtime_checkable
class DescribesInstance(Protocol):
    """A cloud that can describe one instance by id. Without it (Karpenter, which removes its own nodes) no instance is
    ever considered permanently gone."""

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        """Return the instance as it is now; None if the cloud knows no such id. Read-only.

        Raises TransientError, and PermanentError for an instance that is not ours or cannot be looked up here (another
        cloud, project, group or region).
        """


@runtime_checkable
class LaunchesGroups(Protocol):
    """A cloud that launches several equal instances atomically: all of them or none."""

    def can_launch_group(self, pool: str, offer: Offer) -> bool:
        """Return whether orders of this pool and offer can be launched as a group. Depends on settings; no call."""

    async def launch_group(self, transaction: ActionId, orders: Sequence[Order]) -> Sequence[Instance]:
        """Launch all orders, or return the instances that the transaction launched; one per order, in their order.

        The orders differ only in `action_id`. `transaction` is the id of one of them, perhaps of one no longer
        requested, and makes retries idempotent: the same orders, or some of them, return the same instances and never
        launch more. Raises LaunchRefused if none was launched. A refusal can be final for the transaction, as some
        clouds repeat their first answer to a name: a new attempt needs another name. Raises PermanentError for a
        transaction that launched other orders, TransientError.
        """


class CapacityProvider(Protocol):
    """A cloud as the executor and the price watcher use it. Every call has its own time limit. All methods raise
    TransientError if the cloud is unreachable or throttles, or if its answer is lost."""

    name: str

    async def offers(self) -> Sequence[Offer]:
        """Return all offers, with their prices where known."""

    async def launch(self, order: Order) -> Instance:
        """Launch the instance, or return the one launched with this token. Raises LaunchRefused."""

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        """End the instance and return its new state; None if it never existed. Idempotent. Raises PermanentError for an
        instance without our tag."""

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return all instances with this installation's tag, including those terminated in the last hour."""

    async def close(self) -> None:
        """Release connections."""
