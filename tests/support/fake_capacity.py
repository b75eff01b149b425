"""In-memory cloud for unit tests: deterministic, without waits. Passes the contract of the real ones."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

import msgspec

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId, ProviderId, derive_id
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.protocol import (
    RETRY_AFTER_SECONDS,
    Instance,
    LaunchRefused,
    Order,
    RefusalKind,
    RefusalScope,
)

TERMINATED_SHOWN_SECONDS = 3600.0
CODES: dict[RefusalKind, tuple[str, RefusalScope]] = {
    "capacity": ("InsufficientInstanceCapacity", "offer"),
    "quota": ("VcpuLimitExceeded", "region"),
    "permission": ("UnauthorizedOperation", "region"),
    "configuration": ("InvalidParameterValue", "offer"),
}


class _Refusal(msgspec.Struct):
    """Refuse offers whose key matches, after the first `passed_count` launches."""

    pattern: str
    kind: RefusalKind
    wait_seconds: float
    passed_count: int


class FakeCapacity:
    """Sells `offers` to `installation`. Instances run and end immediately, at `now()`."""

    name = "fake"

    def __init__(self, offers: Sequence[Offer], *, installation: str, now: Callable[[], datetime]) -> None:
        self._offers = tuple(offers)
        self._installation = installation
        self._now = now
        self._instances: dict[ProviderId, tuple[str, Instance]] = {}  # provider id: (installation, instance)
        self._by_token: dict[tuple[str, ActionId], tuple[ProviderId, str]] = {}  # token: (provider id, offer key)
        self._refused: list[_Refusal] = []
        self._answers_lost_count = 0
        self.failure: str | None = None  # every call fails with it; None: none
        self.shown_after_seconds = 0.0  # from launch until an instance is listed
        self.launches_count = 0
        self.can_launch_groups = True
        self.group_launch_count = 0  # calls that launched several at once

    def refuse(
        self, pattern: str, kind: RefusalKind = "capacity", *, retry_after_seconds: float = 180.0, passed_count: int = 0
    ) -> None:
        """Refuse offers whose key matches, after the first `passed_count` instances, until `refuse_nothing`."""
        self._refused.append(_Refusal(pattern, kind, retry_after_seconds, passed_count))

    def refuse_nothing(self) -> None:
        """Stop refusing."""
        self._refused.clear()

    def end_unexpectedly(self, provider_id: ProviderId) -> None:
        """End the instance from outside."""
        installation, instance = self._instances[provider_id]
        ended = msgspec.structs.replace(instance, state="terminated", terminated_at=self._now())
        self._instances[provider_id] = (installation, ended)

    def lose_answers(self, count: int) -> None:
        """Execute the next `count` calls and fail to answer them."""
        self._answers_lost_count = count

    async def offers(self) -> Sequence[Offer]:
        """Return all offers."""
        self._ask()
        self._answer()
        return self._offers

    async def launch(self, order: Order) -> Instance:
        """Make the instance, or return the token's. Raises LaunchRefused, PermanentError, TransientError."""
        self._ask()
        token = (order.installation, order.action_id)
        made = self._by_token.get(token)
        if made is not None and made[1] != order.offer.key:
            raise PermanentError(f"token {order.action_id} already bought {made[1]}, not {order.offer.key}")
        if made is None:
            made = self._by_token[token] = (self._make(order), order.offer.key)
        self._answer()
        return self._instances[made[0]][1]

    def can_launch_group(self, pool: str, offer: Offer) -> bool:  # noqa: ARG002 - the same for all pools
        """As configured."""
        return self.can_launch_groups

    async def launch_group(self, transaction: ActionId, orders: Sequence[Order]) -> Sequence[Instance]:
        """Launch all, or return those launched before. Raises LaunchRefused, PermanentError, TransientError."""
        self._ask()
        made = [order for order in orders if (order.installation, order.action_id) in self._by_token]
        if made and len(made) < len(orders):
            raise PermanentError(f"transaction {transaction}: some of its orders were launched separately")
        if not made:
            self._see_sold(orders[0], len(orders))
            for order in orders:
                self._by_token[order.installation, order.action_id] = (self._made(order), order.offer.key)
            self.group_launch_count += 1
        self._answer()
        return [self._instances[self._by_token[order.installation, order.action_id][0]][1] for order in orders]

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        """End the instance. Raises PermanentError for one of another installation, TransientError."""
        self._ask()
        known = self._instances.get(provider_id)
        if known is not None:
            owner, instance = known
            if owner != self._installation:
                raise PermanentError(f"{provider_id} carries the tag of {owner!r}, not ours: left untouched")
            if instance.state != "terminated":
                ended = msgspec.structs.replace(instance, state="terminated", terminated_at=now)
                self._instances[provider_id] = (owner, ended)
        self._answer()
        return self._instances[provider_id][1] if known is not None else None

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        """Return this instance, None if it never was. Raises PermanentError, TransientError."""
        self._ask()
        self._answer()
        owner, instance = self._instances.get(provider_id, (self._installation, None))
        if owner != self._installation:
            raise PermanentError(f"{provider_id} carries the tag of {owner!r}, not ours: left untouched")
        return instance

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return the instances of an installation, those terminated within the last hour included."""
        self._ask()
        self._answer()
        now = self._now()
        oldest = now - timedelta(seconds=TERMINATED_SHOWN_SECONDS)
        return [
            instance
            for owner, instance in self._instances.values()
            if owner == installation
            and instance.launched_at + timedelta(seconds=self.shown_after_seconds) <= now
            and (instance.terminated_at is None or instance.terminated_at >= oldest)
        ]

    async def close(self) -> None:
        """Nothing to close."""

    def _make(self, order: Order) -> ProviderId:
        self._see_sold(order, 1)
        return self._made(order)

    def _see_sold(self, order: Order, count: int) -> None:
        """Raise LaunchRefused unless `count` of this offer can be launched."""
        for rule in self._refused:
            if fnmatchcase(order.offer.key, rule.pattern):
                if rule.passed_count < count:
                    raise _refusal(order, rule.kind, rule.wait_seconds)
                rule.passed_count -= count
        if all(offer.key != order.offer.key for offer in self._offers):
            raise _refusal(order, "capacity", RETRY_AFTER_SECONDS["capacity"])

    def _made(self, order: Order) -> ProviderId:
        sold = next(offer for offer in self._offers if offer.key == order.offer.key)
        self.launches_count += 1
        digest = derive_id("fake", order.installation, order.action_id)
        provider_id = ProviderId(f"fake:///{sold.zone}/i-{digest[:17]}")
        instance = Instance(
            provider_id=provider_id,
            action_id=order.action_id,
            state="running",
            instance_type=sold.instance_type,
            zone=sold.zone,
            capacity_type=sold.capacity_type,
            price_micro_usd_per_hour=sold.price_micro_usd_per_hour,
            launched_at=self._now(),
        )
        self._instances[provider_id] = (order.installation, instance)
        return provider_id

    def _ask(self) -> None:
        if self.failure is not None:
            raise TransientError(f"the fake cloud fails as configured: {self.failure}")

    def _answer(self) -> None:
        if self._answers_lost_count > 0:
            self._answers_lost_count -= 1
            raise TransientError("the fake cloud executed the call and lost the answer, as configured")


def _refusal(order: Order, kind: RefusalKind, wait_seconds: float) -> LaunchRefused:
    code, scope = CODES[kind]
    why = f"{code}: {order.offer.key} cannot be launched now"
    return LaunchRefused(why, code=code, kind=kind, scope=scope, retry_after_seconds=wait_seconds)
