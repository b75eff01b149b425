"""A cloud in memory for unit tests: deterministic, with no waits. It passes the contract of the real ones."""

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
    """Offers whose key matches are refused, but for so many launches first."""

    pattern: str
    kind: RefusalKind
    wait_seconds: float
    passed_count: int


class FakeCapacity:
    """Sells `offers` to `installation`. Instances run at once and end at once, at `now()`."""

    name = "fake"

    def __init__(self, offers: Sequence[Offer], *, installation: str, now: Callable[[], datetime]) -> None:
        self._offers = tuple(offers)
        self._installation = installation
        self._now = now
        self._instances: dict[ProviderId, tuple[str, Instance]] = {}  # provider id: (installation, instance)
        self._by_token: dict[tuple[str, ActionId], tuple[ProviderId, str]] = {}  # token: (provider id, offer key)
        self._refused: list[_Refusal] = []
        self._answers_lost_count = 0
        self.trouble: str | None = None  # what every call fails with; None: nothing is wrong
        self.shown_after_seconds = 0.0  # from its launch until an instance is listed
        self.launches_count = 0
        self.is_together = True
        self.together_count = 0  # of calls that made several at once

    def refuse(
        self,
        pattern: str,
        kind: RefusalKind = "capacity",
        *,
        retry_after_seconds: float = 180.0,
        passed_count: int = 0,
    ) -> None:
        """Refuse offers whose key matches, after so many instances of them, until `refuse_nothing`."""
        self._refused.append(_Refusal(pattern, kind, retry_after_seconds, passed_count))

    def refuse_nothing(self) -> None:
        """Sell everything again."""
        self._refused.clear()

    def let_die(self, provider_id: ProviderId) -> None:
        """End the instance on its own."""
        installation, instance = self._instances[provider_id]
        ended = msgspec.structs.replace(instance, state="terminated", terminated_at=self._now())
        self._instances[provider_id] = (installation, ended)

    def lose_answers(self, count: int) -> None:
        """Do what the next `count` calls ask for, and fail to say so."""
        self._answers_lost_count = count

    async def offers(self) -> Sequence[Offer]:
        """Return everything that is for sale."""
        self._ask()
        self._answer()
        return self._offers

    async def launch(self, order: Order) -> Instance:
        """Make the instance, or return the one of this token. Raises LaunchRefused, PermanentError, TransientError."""
        self._ask()
        token = (order.installation, order.action_id)
        made = self._by_token.get(token)
        if made is not None and made[1] != order.offer.key:
            raise PermanentError(f"token {order.action_id} already bought {made[1]}, not {order.offer.key}")
        if made is None:
            made = self._by_token[token] = (self._make(order), order.offer.key)
        self._answer()
        return self._instances[made[0]][1]

    def can_launch_group(self, pool: str, offer: Offer) -> bool:  # noqa: ARG002 - all pools are the same to it
        """As it was told."""
        return self.is_together

    async def launch_group(self, transaction: ActionId, orders: Sequence[Order]) -> Sequence[Instance]:
        """Make all, or return what was made. Raises LaunchRefused, PermanentError, TransientError."""
        self._ask()
        made = [order for order in orders if (order.installation, order.action_id) in self._by_token]
        if made and len(made) < len(orders):
            raise PermanentError(f"transaction {transaction} has made some of these orders alone")
        if not made:
            self._see_sold(orders[0], len(orders))
            for order in orders:
                self._by_token[order.installation, order.action_id] = (self._made(order), order.offer.key)
            self.together_count += 1
        self._answer()
        return [self._instances[self._by_token[order.installation, order.action_id][0]][1] for order in orders]

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        """End the instance. Raises PermanentError for one of another installation, TransientError."""
        self._ask()
        found = self._instances.get(provider_id)
        if found is not None:
            installation, instance = found
            if installation != self._installation:
                raise PermanentError(f"{provider_id} carries the tag of {installation!r}, not ours: it is left alone")
            if instance.state != "terminated":
                ended = msgspec.structs.replace(instance, state="terminated", terminated_at=now)
                self._instances[provider_id] = (installation, ended)
        self._answer()
        return self._instances[provider_id][1] if found is not None else None

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        """Return this instance, None if it never was. Raises PermanentError, TransientError."""
        self._ask()
        self._answer()
        installation, instance = self._instances.get(provider_id, (self._installation, None))
        if installation != self._installation:
            raise PermanentError(f"{provider_id} carries the tag of {installation!r}, not ours: it is left alone")
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
        """Nothing is held."""

    def _make(self, order: Order) -> ProviderId:
        self._see_sold(order, 1)
        return self._made(order)

    def _see_sold(self, order: Order, count: int) -> None:
        """Raise LaunchRefused unless so many of this offer are to be had."""
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
        if self.trouble is not None:
            raise TransientError(f"the fake cloud fails, as it was told to: {self.trouble}")

    def _answer(self) -> None:
        if self._answers_lost_count > 0:
            self._answers_lost_count -= 1
            raise TransientError("the fake cloud did it and lost the answer, as it was told to")


def _refusal(order: Order, kind: RefusalKind, wait_seconds: float) -> LaunchRefused:
    code, scope = CODES[kind]
    why = f"{code}: {order.offer.key} cannot be launched now"
    return LaunchRefused(why, code=code, kind=kind, scope=scope, retry_after_seconds=wait_seconds)
