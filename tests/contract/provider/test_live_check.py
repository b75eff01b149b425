"""`doctor --live` runs the launch check with each driver and always terminates what it launched."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import cast

import msgspec
import pytest
from tests.contract.provider.contract import OURS, Rig, order
from tests.contract.provider.test_aws import AwsRig
from tests.contract.provider.test_aws_groups import GroupRig
from tests.contract.provider.test_azure import AzureRig
from tests.contract.provider.test_gcp import GcpRig
from tests.contract.provider.test_sim import SimRig
from tests.support.aws import served_region
from tests.support.azure import served_group
from tests.support.fake_capacity import FakeCapacity
from tests.support.gcp import served_project

from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.protocol import CapacityProvider, Instance, Order
from gpu_autoscaler.providers.sim import SimCapacity
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.simcloud.faults import Fault
from gpu_autoscaler_services.cli.live_check import LiveCheck, LiveLimits, LiveReport

pytestmark = pytest.mark.timeout(240)

STEPS = [
    "launch",
    "repeat with the same token",
    "listed",
    "described by id",
    "price",
    "detached from its group",
    "terminate",
    "repeat terminate",
    "reported as terminated",
    "no instance left",
]
END_CALLS = ("TerminateInstance*", "VirtualMachines_Delete", "instanceGroupManagers.deleteInstances")


class RigClock(Clock):
    """Cluster time of the rig: it passes when somebody waits, at once."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self._rig = rig

    def now(self) -> datetime:
        """The rig's."""
        return self._rig.now()

    async def sleep(self, seconds: float) -> None:
        """Turn it; others get their turn."""
        await self._rig.wait(seconds)
        await asyncio.sleep(0)


class Walk:
    """One live check on a rig, with its report."""

    def __init__(self, rig: Rig, open_driver: Callable[[], CapacityProvider], wanted: Order) -> None:
        self.rig = rig
        self.wanted = wanted
        self.told: list[Finding] = []
        self.on_step: Callable[[Finding], None] = lambda _: None
        self.check = LiveCheck(open_driver, wanted, RigClock(rig), self._say, LiveLimits(poll_seconds=20.0))

    def _say(self, found: Finding) -> None:
        self.told.append(found)
        self.on_step(found)

    async def run(self) -> LiveReport:
        """To its end."""
        report = await self.check.run()
        assert list(report.steps) == self.told
        return report

    def faults(self) -> dict[str, str]:
        """Failed step -> its message."""
        return {one.subject.removeprefix("live: "): one.message for one in self.told if one.level == "error"}

    async def living(self) -> Sequence[Instance]:
        """What is there of ours, as the rig's own driver lists it once lists show everything."""
        await self.rig.wait(120)
        return [instance for instance in await self.rig.ours.instances(OURS) if instance.state != "terminated"]


@pytest.fixture(params=["sim", "aws", "aws group", "azure", "gcp"])
async def walk(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Walk]:
    """A walk of each cloud's driver over its fake."""
    match request.param:
        case "sim":
            sim = SimRig()
            await sim.open()
            yield Walk(sim, lambda: SimCapacity(sim.url, installation=OURS), await _order(sim))
            await sim.close()
        case "azure":
            async with served_group(tmp_path) as group:
                azure = AzureRig(group)
                yield Walk(azure, lambda: group.provider(OURS), await _order(azure))
                await _closed(azure)
        case "gcp":
            async with served_project() as project:
                gcp = GcpRig(project)
                yield Walk(gcp, lambda: project.provider(OURS), await _order(gcp))
                await _closed(gcp)
        case kind:
            with served_region() as region:
                grouped = {"launch_template": None, "subnets": (), "groups": ("default=gpu-workers",)}
                more = grouped if kind == "aws group" else {}
                aws = GroupRig(region) if more else AwsRig(region)
                yield Walk(aws, lambda: region.provider(OURS, **more), await _order(aws))
                await _closed(aws)


async def _order(rig: Rig) -> Order:
    return msgspec.structs.replace(await order(rig), action_id=ActionId("0123456789abcdef" * 2))


async def _closed(rig: Rig) -> None:
    await rig.ours.close()
    await rig.theirs.close()


@pytest.mark.cloud("aws", errors=("doctor --live: a whole life",))
@pytest.mark.cloud("azure", errors=("doctor --live: a whole life",))
@pytest.mark.cloud("gcp", errors=("doctor --live: a whole life",))
async def test_a_working_cloud_passes_and_is_left_empty(walk: Walk) -> None:
    """Every step succeeds and reports its duration; nothing runs afterwards, one instance was launched."""
    report = await walk.run()
    assert walk.faults() == {}
    assert [step.subject.removeprefix("live: ") for step in report.steps] == STEPS
    assert all(step.message.endswith(" s)") for step in report.steps)
    assert (report.left, report.is_interrupted) == ((), False)
    assert not await walk.living()
    assert len(await walk.rig.ours.instances(OURS)) <= 1  # Azure shows nothing of what ended


async def test_other_instances_of_the_installation_are_left_untouched(walk: Walk) -> None:
    """The scaler's instances keep running."""
    bought = await walk.rig.ours.launch(msgspec.structs.replace(walk.wanted, action_id=ActionId("another")))
    await walk.run()
    assert walk.faults() == {}
    assert [one.provider_id for one in await walk.living()] == [bought.provider_id]


async def test_a_refusal_is_reported_and_leaves_nothing(walk: Walk) -> None:
    """With its next step; the list is checked anyway."""
    await walk.rig.refuse(walk.wanted.offer.key)
    report = await walk.run()
    assert list(walk.faults()) == ["launch"]
    assert walk.rig.capacity_code in walk.faults()["launch"]
    assert "--offer" in report.steps[0].next_step
    assert [step.subject for step in report.steps] == ["live: launch", "live: no instance left"]
    assert not await walk.living()


async def test_a_lost_answer_is_retried(walk: Walk) -> None:
    """The launch succeeded without an answer: the same token finds it."""
    await walk.rig.lose_next_answer()
    await walk.run()
    assert walk.faults() == {}
    assert not await walk.living()
    assert len(await walk.rig.ours.instances(OURS)) <= 1  # Azure shows nothing of what ended


async def test_a_late_listing_is_waited_for(walk: Walk) -> None:
    """The step reports after how many seconds it was listed."""
    await walk.rig.show_after(60)
    await walk.run()
    (listed,) = [one for one in walk.told if one.subject == "live: listed"]
    assert walk.faults() == {}
    assert any(f"{seconds} s after the launch request" in listed.message for seconds in range(55, 90))


async def test_a_missing_listing_is_an_error_and_terminated(walk: Walk) -> None:
    """At the step's limit; absence from lists is no proof of an end, so it is terminated once it is listed."""
    await walk.rig.show_after(800)
    report = await walk.run()
    assert "not listed with our tags within 300 s" in walk.faults()["listed"]
    await walk.rig.wait(900)
    assert not await walk.living()
    assert report.left == ()


async def test_a_failing_termination_is_retried(walk: Walk) -> None:
    """Throttled or down for a while: it ends in the same step."""

    def trouble(found: Finding) -> None:
        if found.subject == "live: detached from its group":
            _let_ends_fail(walk.rig, left_count=3)

    walk.on_step = trouble
    report = await walk.run()
    assert walk.faults() == {}
    assert report.left == ()
    assert not await walk.living()


async def test_a_missing_end_is_reported_prominently(walk: Walk) -> None:
    """With the instance's id; the check finishes anyway."""

    def trouble(found: Finding) -> None:
        if found.subject == "live: detached from its group":
            _let_ends_fail(walk.rig, left_count=1000)

    walk.on_step = trouble
    report = await walk.run()
    (left,) = report.left
    assert left is not None
    assert left in walk.faults()["NOT TERMINATED"]
    assert "terminate" in walk.faults()
    assert [one.provider_id for one in await walk.living()] == [left]


@pytest.mark.cloud("aws", errors=("doctor --live: interrupted",))
@pytest.mark.cloud("azure", errors=("doctor --live: interrupted",))
@pytest.mark.cloud("gcp", errors=("doctor --live: interrupted",))
@pytest.mark.parametrize("after", ["launch", "listed", "terminate"])
async def test_an_interruption_terminates_the_instance(walk: Walk, after: str) -> None:
    """At any step: nothing keeps running, and the remaining steps are skipped."""

    def interrupt(found: Finding) -> None:
        if found.subject == f"live: {after}":
            walk.check.interrupt()

    walk.on_step = interrupt
    report = await walk.run()
    assert report.is_interrupted
    assert report.left == ()
    assert "reported as terminated" not in [step.subject.removeprefix("live: ") for step in report.steps]
    assert [step.subject for step in report.steps[-2:]] == ["live: interrupted", "live: terminated"]
    assert not await walk.living()


async def test_an_interruption_with_lost_answers_terminates_the_instance(walk: Walk) -> None:
    """Its id is unknown: it is found by its action id."""
    await walk.rig.lose_next_answer()
    pause = walk.rig.wait

    async def interrupted_wait(seconds: float) -> None:
        walk.check.interrupt()
        await pause(seconds)

    walk.rig.wait = interrupted_wait  # type: ignore[method-assign]
    report = await walk.run()
    walk.rig.wait = pause  # type: ignore[method-assign]
    assert report.is_interrupted
    assert "live: launch" not in [step.subject for step in report.steps]
    assert report.left == ()
    assert not await walk.living()
    assert {instance.state for instance in await walk.rig.ours.instances(OURS)} <= {"terminated"}


async def test_an_unexpected_error_leaves_nothing_running(walk: Walk) -> None:
    """It is raised after the instance was terminated."""

    def stumble(found: Finding) -> None:
        if found.subject == "live: price":
            raise KeyError("a bug")

    walk.on_step = stumble
    with pytest.raises(KeyError, match="a bug"):
        await walk.check.run()
    assert walk.check.not_ended == ()
    assert not await walk.living()


class Forgetful(FakeCapacity):
    """A cloud that breaks its promise: it takes no notice of tokens."""

    async def launch(self, order: Order) -> Instance:
        """Another one each time."""
        self._by_token.clear()
        self._launches = getattr(self, "_launches", 0) + 1
        made = await super().launch(order)
        if self._launches == 1:
            return made
        twin = ProviderId(f"{made.provider_id}-{self._launches}")
        second = msgspec.structs.replace(made, provider_id=twin)
        self._instances[twin] = (order.installation, second)
        return second


class Renamed(FakeCapacity):
    """A cloud that shows other people's action id and price."""

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        """With an action id of somebody else."""
        found = await super().instance(provider_id)
        return None if found is None else msgspec.structs.replace(found, action_id=ActionId("somebody"))

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Without a price."""
        found = await super().instances(installation)
        return [msgspec.structs.replace(one, price_micro_usd_per_hour=None) for one in found]

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        """Twice is an error, and no second end is needed."""
        found = self._instances[provider_id][1]
        if found.state == "terminated":
            raise PermanentError("no such instance")
        return await super().terminate(provider_id, now=now)


async def _broken(kind: type[FakeCapacity]) -> tuple[Walk, FakeCapacity]:
    sim = SimRig()  # for its clock, and the offers of its cloud
    offers = tuple(offer for offer in sim.cloud.offers() if offer.price_micro_usd_per_hour)
    cloud = kind(offers, installation=OURS, now=sim.now)
    sim.ours = cast("SimCapacity", cloud)
    return Walk(sim, lambda: cloud, await _order(sim)), cloud


async def test_a_second_launch_by_one_token_is_an_error() -> None:
    """Both instances are terminated."""
    walk, cloud = await _broken(Forgetful)
    report = await walk.run()
    assert "bought a second instance" in walk.faults()["repeat with the same token"]
    assert report.left == ()
    assert [instance.state for instance in await cloud.instances(OURS)] == ["terminated", "terminated"]


async def test_each_violation_is_an_error_of_its_step() -> None:
    """Tags, price, repeated termination; the check continues after each."""
    walk, cloud = await _broken(Renamed)
    report = await walk.run()
    assert {"described by id", "price", "repeat terminate"} <= set(walk.faults())
    assert report.left == ()
    assert [instance.state for instance in await cloud.instances(OURS)] == ["terminated"]


def _let_ends_fail(rig: Rig, *, left_count: int) -> None:
    """Fail the next `left_count` termination calls with the cloud's throttling error."""
    if isinstance(rig, SimRig):
        from gpu_autoscaler.simcluster.faults import Refusal  # noqa: PLC0415 - this rig's alone

        rig.world.faults.refuse(
            Refusal(method="DELETE", path_prefix="/cloud/instances", status=503, left_count=left_count)
        )
        return
    assert isinstance(rig, AwsRig | AzureRig | GcpRig)
    code = {AzureRig: "ServiceUnavailable", GcpRig: "backendError"}.get(type(rig), "ServiceUnavailable")
    for call in END_CALLS:
        rig.fake.faults.add(Fault(kind="refused", call=call, code=code, left_count=left_count))
