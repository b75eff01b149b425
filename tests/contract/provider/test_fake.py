"""Provider contract of the in-memory fake."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from tests.contract.provider.contract import OURS, ProviderContract, Rig, Trouble
from tests.contract.provider.launch_groups import LaunchGroupsContract
from tests.support.fake_capacity import FakeCapacity

from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.providers.protocol import Order, RefusalKind
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG, offers_of


class FakeRig(Rig):
    """Two installations, one fake: the stranger's calls go through the same books."""

    def __init__(self) -> None:
        self._at = datetime(2026, 11, 21, 12, tzinfo=UTC)
        self.cloud = FakeCapacity(offers_of(INSTANCE_CATALOG[:2]), installation=OURS, now=self.now)
        self.ours = self.cloud
        self.theirs = self.cloud

    def now(self) -> datetime:
        """Moves in `wait` alone."""
        return self._at

    async def refuse(self, pattern: str, kind: RefusalKind = "capacity") -> None:
        """As the fake can."""
        self.cloud.refuse(pattern, kind)

    async def leave_room(self, pattern: str, count: int) -> None:
        """As the fake can."""
        self.cloud.refuse(pattern, passed_count=count)

    async def trouble(self, kind: Trouble) -> None:
        """As the fake can."""
        self.cloud.failure = kind

    async def calm(self) -> None:
        """As the fake can."""
        self.cloud.failure = None

    async def show_after(self, seconds: float) -> None:
        """As the fake can."""
        self.cloud.shown_after_seconds = seconds

    async def end_unexpectedly(self, provider_id: ProviderId) -> None:
        """As the fake can."""
        self.cloud.end_unexpectedly(provider_id)

    async def stock(self, wanted: Order, count: int) -> None:
        """Bought, one by one."""
        for number in range(count):
            await self.cloud.launch(msgspec.structs.replace(wanted, action_id=ActionId(f"stock-{number}")))

    async def stranger(self, wanted: Order) -> ProviderId:
        """Return an instance without an order."""
        made = await self.cloud.launch(msgspec.structs.replace(wanted, installation=""))
        return made.provider_id

    async def refuse_nothing(self) -> None:
        """As the fake can."""
        self.cloud.refuse_nothing()

    async def lose_next_answer(self) -> None:
        """As the fake can."""
        self.cloud.lose_answers(1)

    async def wait(self, seconds: float) -> None:
        """At once."""
        self._at += timedelta(seconds=seconds)


class TestFake(ProviderContract, LaunchGroupsContract):
    """The inherited promises."""

    @pytest.fixture
    def rig(self) -> Rig:
        """A fake cloud."""
        return FakeRig()
