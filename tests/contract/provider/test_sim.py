"""Provider contract of the simulated cloud's driver, over HTTP to simcluster."""

import asyncio
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from tests.contract.provider.contract import OURS, THEIRS, ProviderContract, Rig, Trouble, order
from tests.contract.provider.launch_groups import LaunchGroupsContract
from tests.support.fake_capacity import CODES

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.providers.protocol import Order, RefusalKind
from gpu_autoscaler.providers.sim import SimCapacity
from gpu_autoscaler.simcluster.cloud import RefusalRule
from gpu_autoscaler.simcluster.cloud_http import attach_cloud
from gpu_autoscaler.simcluster.faults import Latency, Refusal
from gpu_autoscaler.simcluster.server import start
from gpu_autoscaler.simcluster.world import World


class TurnedClock:
    """Cluster time set by the test; the server's loop runs in wall time."""

    factor = 1.0

    def __init__(self) -> None:
        self.at = datetime(2026, 11, 21, 12, tzinfo=UTC)

    def now(self) -> datetime:
        """Where the test left it."""
        return self.at

    async def sleep(self, seconds: float) -> None:  # noqa: ARG002 - steps follow wall time
        """A moment."""
        await asyncio.sleep(0.01)


class SimRig(Rig):
    """A served cluster with its cloud, and two installations that buy from it."""

    def __init__(self) -> None:
        self.clock = TurnedClock()
        self.world = World(self.clock, seed=1)
        self.cloud, self.routes = attach_cloud(self.world)

    async def open(self) -> None:
        """Serve, and connect both installations."""
        self._runner, self.url = await start(self.world, extensions=[self.routes])
        self.sim = SimCapacity(self.url, installation=OURS, call_seconds_max=30.0)
        self.ours = self.sim
        self.theirs = SimCapacity(self.url, installation=THEIRS, call_seconds_max=30.0)

    async def close(self) -> None:
        """Disconnect both and stop serving."""
        await self.ours.close()
        await self.theirs.close()
        await self._runner.cleanup()

    def now(self) -> datetime:
        """Moves in `wait` alone."""
        return self.clock.now()

    async def refuse(self, pattern: str, kind: RefusalKind = "capacity") -> None:
        """Until the test changes it."""
        self.cloud.refuse(RefusalRule(pattern=pattern, code=CODES[kind][0], left_count=None, until=None))

    async def leave_room(self, pattern: str, count: int) -> None:
        """By the same rule, a little later."""
        code = CODES["capacity"][0]
        self.cloud.refuse(RefusalRule(pattern=pattern, code=code, left_count=None, until=None, passed_count=count))

    async def trouble(self, kind: Trouble) -> None:
        """Return it as HTTP."""
        status = {"throttled": 429, "down": 503, "expired": 500}[kind]
        self.world.faults.refuse(Refusal(method="*", path_prefix="/cloud", status=status, left_count=1000))

    async def calm(self) -> None:
        """All faults go."""
        self.world.faults.clear()

    async def show_after(self, seconds: float) -> None:
        """By the cloud itself."""
        self.cloud.shown_after_seconds = seconds

    async def end_unexpectedly(self, provider_id: ProviderId) -> None:
        """By the cloud itself."""
        self.cloud.end_unexpectedly(
            next(machine for machine in self.cloud.machines if machine.provider_id == provider_id)
        )

    async def stock(self, wanted: Order, count: int) -> None:
        """Past HTTP."""
        for number in range(count):
            self.cloud.launch(msgspec.structs.replace(wanted, action_id=ActionId(f"stock-{number}")))

    async def stranger(self, wanted: Order) -> ProviderId:
        """Its tag is taken off."""
        made = self.cloud.launch(wanted)
        machine = next(machine for machine in self.cloud.machines if machine.provider_id == made.provider_id)
        machine.installation = None
        return made.provider_id

    async def refuse_nothing(self) -> None:
        """All rules go."""
        self.cloud.rules.clear()

    async def lose_next_answer(self) -> None:
        """Performed, then answered 503."""
        self.world.faults.refuse(
            Refusal(method="*", path_prefix="/cloud/instances", status=503, left_count=1, performed=True)
        )

    async def wait(self, seconds: float) -> None:
        """In steps, each of which the cloud takes its turn in."""
        for _ in range(10):
            self.clock.at += timedelta(seconds=seconds / 10)
            self.world.step()


@pytest.fixture
async def rig() -> AsyncIterator[SimRig]:
    """A simulated cloud behind HTTP."""
    made = SimRig()
    await made.open()
    yield made
    await made.close()


class TestSim(ProviderContract):
    """The inherited promises; the fixture is the module's."""


class TestSimLaunchGroups(LaunchGroupsContract):
    """The same, of several at once."""


async def test_a_slow_answer_is_a_transient_error(rig: SimRig) -> None:
    """The call ends at its limit."""
    hasty = SimCapacity(rig.url, installation=OURS, call_seconds_max=0.1)
    rig.world.faults.slow(Latency(path_prefix="/cloud", wait_seconds=1.0))
    with pytest.raises(TransientError, match="safe to retry"):
        await hasty.offers()
    await hasty.close()


async def test_throttling_has_a_wait(rig: SimRig) -> None:
    """429 is transient, with the server's own wait."""
    rig.world.faults.refuse(Refusal(method="*", path_prefix="/cloud", status=429, left_count=1, retry_after_seconds=7))
    with pytest.raises(TransientError) as throttled:
        await rig.ours.instances(OURS)
    assert throttled.value.retry_after_seconds == 7


async def test_a_cloud_that_is_down_is_a_transient_error() -> None:
    """Connection refused: not an empty list."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        provider = SimCapacity(f"http://127.0.0.1:{held.getsockname()[1]}", installation=OURS)
        with pytest.raises(TransientError):
            await provider.instances(OURS)
        await provider.close()


async def test_an_instance_of_another_cloud_is_left_untouched(rig: SimRig) -> None:
    """Its name alone tells; nothing is asked."""
    with pytest.raises(PermanentError, match="is not an instance of"):
        await rig.ours.terminate(ProviderId("aws:///eu-west-1a/i-0123456789abcdef0"), now=rig.now())


async def test_another_server_at_the_address_is_reported(rig: SimRig) -> None:
    """The error names what to check."""
    provider = SimCapacity(rig.url + "/elsewhere", installation=OURS)
    with pytest.raises(PermanentError, match="check the URL of simcluster"):
        await provider.launch(await order(rig))
    await provider.close()
