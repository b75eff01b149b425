"""Google Cloud resize requests: all instances of a gang or none, named by their orders."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.contract.provider.contract import OURS, THEIRS, order
from tests.contract.provider.launch_groups import FIRST, LaunchGroupsContract, gang, listed, names
from tests.contract.provider.test_gcp import GcpRig
from tests.support.gcp import Project, served_project

from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.providers.gcp.capacity import GcpCapacity
from gpu_autoscaler.providers.gcp.options import GcpOptions, validate_options
from gpu_autoscaler.providers.protocol import LaunchRefused
from gpu_autoscaler.simcloud.faults import Fault

pytestmark = pytest.mark.timeout(180)

REQUESTS = "instanceGroupManagerResizeRequests"
TOGETHER = ("europe-west4-a/g2-standard-4-on-demand=g2-standard-4",)


class TogetherRig(GcpRig):
    """The same project, where one group makes gangs all at once."""

    ours: GcpCapacity
    theirs: GcpCapacity

    def __init__(self, project: Project) -> None:
        super().__init__(project)
        self.ours = self.fresh()
        self.theirs = project.provider(THEIRS, resize_request_groups=TOGETHER)

    def fresh(self) -> GcpCapacity:
        """A driver of ours that has just started."""
        return self.project.provider(OURS, resize_request_groups=TOGETHER)

    async def leave_room(self, pattern: str, count: int) -> None:
        """By the fake's own books."""
        self.fake.room[pattern] = count

    async def refuse_nothing(self) -> None:
        """Room for everything as well."""
        self.fake.room.clear()
        await super().refuse_nothing()

    async def lose_next_answer(self) -> None:
        """Of a request."""
        self.fake.faults.add(Fault(kind="lost", call=f"{REQUESTS}.insert", left_count=1))

    def request_names(self) -> list[str]:
        """Return the existing resize requests."""
        return [name for _, _, name in self.fake.resizes.requests]


@pytest.fixture
async def rig() -> AsyncIterator[TogetherRig]:
    """A project, and two installations that buy there."""
    async with served_project() as project:
        made = TogetherRig(project)
        yield made
        await made.ours.close()
        await made.theirs.close()


@pytest.mark.cloud(
    "gcp",
    calls=(
        "instanceGroupManagerResizeRequests.insert",
        "instanceGroupManagerResizeRequests.get",
        "instanceGroupManagerResizeRequests.list",
        "instanceGroupManagerResizeRequests.cancel",
        "instanceGroupManagerResizeRequests.delete",
    ),
    errors=("resize request without capacity for all", "RESIZE_REQUEST_TIMED_OUT"),
)
class TestGcpResizeRequests(LaunchGroupsContract):
    """The inherited promises; the fixture is the module's."""


async def test_a_request_has_instance_names_and_run_duration(rig: TogetherRig) -> None:
    """One call for all; each has owner, order and node labels from its creation."""
    wanted = await gang(rig)
    made = await rig.ours.launch_group(FIRST, wanted)
    (asked,) = rig.fake.asked_of(f"{REQUESTS}.insert")
    asked_names = [instance["name"] for instance in asked.body["instances"]]
    assert asked_names == [one.provider_id.rpartition("/")[2] for one in made]
    assert asked.body["requestedRunDuration"] == {"seconds": "604800"}
    assert not rig.fake.asked_of("instanceGroupManagers.createInstances")
    marks = [machine.metadata for machine in rig.fake.machines.machines.values()]
    assert [mark["gpu-autoscaler-action-id"] for mark in marks] == ["t1", "t2", "t3"]
    assert {mark["gpu-autoscaler-installation"] for mark in marks} == {OURS}
    assert {mark["gpu-autoscaler-node-labels"] for mark in marks} == {"team=vision"}


async def test_offers_with_a_run_duration_have_an_end(rig: TogetherRig) -> None:
    """Work moves before it, as before the end of a capacity block."""
    offers = {offer.key: offer for offer in await rig.ours.offers()}
    sold = offers["g2-standard-4/europe-west4-a/on-demand"]
    assert sold.paid_until is not None
    assert 0 <= 604800 - (sold.paid_until - rig.now()).total_seconds() < 3600
    assert offers["g2-standard-4/europe-west4-b/on-demand"].paid_until is None
    assert rig.ours.can_launch_group("default", sold)
    assert not rig.ours.can_launch_group("default", offers["g2-standard-4/europe-west4-b/on-demand"])
    assert not rig.ours.can_launch_group("default", offers["g2-standard-4/europe-west4-a/spot"])


async def test_a_refused_request_leaves_nothing_behind(rig: TogetherRig) -> None:
    """Cancelled, read back and deleted before it is reported: nothing comes of it later."""
    await rig.leave_room("g2-standard-4/europe-west4-a/on-demand", 2)
    with pytest.raises(LaunchRefused) as refused:
        await rig.ours.launch_group(FIRST, await gang(rig))
    assert refused.value.code == "ZONE_RESOURCE_POOL_EXHAUSTED"
    assert rig.request_names() == []
    assert not any(group.wanted for group in rig.fake.machines.groups.values())
    await rig.refuse_nothing()
    await rig.wait(600)
    assert await listed(rig) == {}
    assert rig.fake.machines.launches_count == 0


async def test_a_silently_waiting_request_times_out(rig: TogetherRig) -> None:
    """No attempt fails or succeeds: one request until its limit, then a refusal for capacity."""
    rig.project.call_seconds_max = 4.0  # of a try, and of each of its calls
    hasty = rig.fresh()
    wanted = await gang(rig)
    await hasty.offers()
    rig.fake.resizes.waits_silently = True
    for _ in range(2):
        with pytest.raises(TransientError):
            await hasty.launch_group(FIRST, wanted)
        await rig.wait(160)
    assert len(rig.fake.asked_of(f"{REQUESTS}.insert")) == 1
    with pytest.raises((LaunchRefused, TransientError)):
        await hasty.launch_group(FIRST, wanted)
    await hasty.close()
    # The next request reports the failure if the first one ended before it was known.
    rig.fake.resizes.waits_silently = False
    await rig.leave_room(wanted[0].offer.key, 0)
    with pytest.raises(LaunchRefused) as refused:
        await rig.ours.launch_group(FIRST, wanted)
    assert refused.value.kind == "capacity"
    assert rig.request_names() == []
    assert rig.fake.machines.launches_count == 0


async def test_an_abandoned_request_is_cancelled(rig: TogetherRig) -> None:
    """With the next lists, once it is too old."""
    rig.project.call_seconds_max = 4.0  # of a try, and of each of its calls
    hasty = rig.fresh()
    wanted = await gang(rig)
    await hasty.offers()
    rig.fake.resizes.waits_silently = True
    with pytest.raises(TransientError):
        await hasty.launch_group(FIRST, wanted)
    await hasty.instances(OURS)
    assert [request.state for request in rig.fake.resizes.requests.values()] == ["ACCEPTED"]
    await rig.wait(700)
    await hasty.instances(OURS)
    await hasty.close()
    assert [request.state for request in rig.fake.resizes.requests.values()] == ["CANCELLED"]
    assert not any(group.wanted for group in rig.fake.machines.groups.values())


async def test_old_requests_are_deleted(rig: TogetherRig) -> None:
    """With the next one; those of others stay, and a failed deletion blocks no launch."""
    await rig.ours.launch_group(FIRST, await gang(rig))
    await rig.theirs.launch_group(FIRST, await gang(rig, installation=THEIRS))
    (ours, theirs) = rig.request_names()
    await rig.wait(90000)
    rig.fake.faults.add(Fault(kind="refused", call=f"{REQUESTS}.delete", code="backendError", left_count=1))
    await rig.ours.launch_group(ActionId("t11"), await gang(rig, first=11))
    assert ours in rig.request_names()
    await rig.ours.launch_group(ActionId("t21"), await gang(rig, first=21))
    assert ours not in rig.request_names()
    assert theirs in rig.request_names()
    assert len(rig.request_names()) == 3


async def test_a_restarted_driver_finds_launched_instances(rig: TogetherRig) -> None:
    """Also when some of the orders are no longer wanted."""
    wanted = await gang(rig)
    await rig.lose_next_answer()
    with pytest.raises(TransientError):
        await rig.ours.launch_group(FIRST, wanted)
    fresh = rig.fresh()
    made = await fresh.launch_group(FIRST, wanted[2:])
    told = names(list(await fresh.instances(OURS)))
    await fresh.close()
    assert sorted(told) == ["t1", "t2", "t3"]
    assert told["t3"] == made[0].provider_id
    assert len(rig.fake.asked_of(f"{REQUESTS}.insert")) == 1


@pytest.mark.parametrize("kind", ["quota", "permission", "configuration"])
async def test_a_request_has_every_kind_of_refusal(rig: TogetherRig, kind: str) -> None:
    """Of its kind, raised once for all orders, and nothing stays."""
    wanted = await gang(rig)
    code = {"quota": "QUOTA_EXCEEDED", "permission": "forbidden", "configuration": "invalid"}[kind]
    rig.fake.faults.add(Fault(kind="refused", call=f"{REQUESTS}.insert", offer=wanted[0].offer.key, code=code))
    with pytest.raises(LaunchRefused) as refused:
        await rig.ours.launch_group(FIRST, wanted)
    assert refused.value.kind == kind
    assert rig.request_names() == []


async def test_google_s_own_client_makes_resize_requests(rig: TogetherRig) -> None:
    """Insert, get, list, cancel and delete; every answer has the described form."""
    from google.oauth2.credentials import Credentials  # noqa: PLC0415 - dev only, and slow to load
    from googleapiclient.discovery import build  # noqa: PLC0415 - as above
    from googleapiclient.errors import HttpError  # noqa: PLC0415 - as above

    from gpu_autoscaler.simcloud.gcp.description import description  # noqa: PLC0415 - needs googleapiclient

    group = {"project": "fake-project", "zone": "europe-west4-a", "instanceGroupManager": "g2-standard-4-on-demand"}

    def drive() -> list[tuple[str, object]]:
        api = build(
            "compute",
            "v1",
            credentials=Credentials(token="fake"),  # type: ignore[no-untyped-call]
            static_discovery=True,
            client_options={"api_endpoint": f"{rig.project.url}/compute/v1/"},
        )
        requests, run = api.instanceGroupManagerResizeRequests(), {"seconds": "3600"}
        body = {"name": "all", "requestedRunDuration": run, "instances": [{"name": "one"}, {"name": "two"}]}
        one = {**group, "resizeRequest": "all"}
        answers = [(f"{REQUESTS}.insert", requests.insert(**group, body=body).execute())]
        for wrong, words in (({**body, "resizeBi": 2}, "Unknown name"), (body, "already exists")):
            with pytest.raises(HttpError, match=words):
                requests.insert(**group, body=wrong).execute()
        with pytest.raises(HttpError, match="between 10 minutes and 7 days"):
            requests.insert(**group, body={**body, "name": "b", "requestedRunDuration": {"seconds": "60"}}).execute()
        with pytest.raises(HttpError, match="cancel it first"):
            requests.delete(**one).execute()
        answers += [
            (f"{REQUESTS}.get", requests.get(**one).execute()),
            (f"{REQUESTS}.list", requests.list(**group).execute()),
            (f"{REQUESTS}.cancel", requests.cancel(**one).execute()),
            (f"{REQUESTS}.delete", requests.delete(**one).execute()),
        ]
        with pytest.raises(HttpError, match="was not found"):
            requests.get(**one).execute()
        api.close()
        return answers

    await rig.leave_room("g2-standard-4/europe-west4-a/on-demand", 1)
    answers = await asyncio.to_thread(drive)
    for name, told in answers:
        assert description().answer_violations(description().named(name), told) == [], name
    assert rig.request_names() == []


async def test_single_orders_use_the_group_directly(rig: TogetherRig) -> None:
    """By name, without a resize request."""
    made = await rig.ours.launch(await order(rig, "alone"))
    assert made.action_id == ActionId("alone")
    assert not rig.fake.asked_of(f"{REQUESTS}.insert")


async def test_groups_unfit_for_resize_requests_are_reported(rig: TogetherRig) -> None:
    """Of another type than the setting, or spot; settings without group or type."""
    wrong = ("europe-west4-a/g2-standard-4-on-demand=a3-highgpu-8g", "europe-west4-a/g2-standard-4-spot=g2-standard-4")
    provider = rig.project.provider(OURS, resize_request_groups=wrong)
    told = " ".join(f"{one.subject}: {one.message}" for one in await provider.preflight() if one.level == "error")
    await provider.close()
    assert "gcp.groups europe-west4-a/g2-standard-4-on-demand: it launches g2-standard-4, not a3-highgpu-8g" in told
    assert "gcp.groups europe-west4-a/g2-standard-4-spot: resize requests do not support spot" in told
    options = GcpOptions(
        project="p", groups=("*=europe-west4-a/l4",), resize_request_groups=("europe-west4-a/l4", "x/y=z")
    )
    with pytest.raises(ConfigError) as mistakes:
        validate_options(options)
    assert len(mistakes.value.violations) == 2
    validate_options(msgspec.structs.replace(options, resize_request_groups=("europe-west4-a/l4=g2-standard-4",)))
