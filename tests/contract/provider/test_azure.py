"""Provider contract of the Azure driver, by REST against a simulated Azure that validates requests by Azure's types."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from tests.contract.provider.contract import OURS, THEIRS, ProviderContract, Rig, Trouble, order
from tests.support.azure import Group, served_group

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import CapacityType, UnavailabilityCause
from gpu_autoscaler.providers.azure.launch import FlexibleScaleSet
from gpu_autoscaler.providers.azure.launch_log import (
    ORDERS_MAX,
    TAG_LENGTH_MAX,
    TAGS_MAX,
    decode_launches,
    encode_launches,
    launch_digest,
)
from gpu_autoscaler.providers.azure.translate import LAUNCH_LOG_TAG
from gpu_autoscaler.providers.protocol import LaunchRefused, Order, RefusalKind
from gpu_autoscaler.simcloud.faults import Fault

pytestmark = pytest.mark.timeout(180)


REFUSED = {
    "capacity": "ZonalAllocationFailed",
    "quota": "OperationNotAllowed",
    "permission": "AuthorizationFailed",
    "configuration": "InvalidParameter",
}
ENDS = ("VirtualMachines_Delete", "VirtualMachineScaleSets_DeleteInstances")
TROUBLE: dict[Trouble, str] = {
    "throttled": "TooManyRequests",
    "down": "ServiceUnavailable",
    "expired": "ExpiredAuthenticationToken",
}


class AzureRig(Rig):
    """One resource group, two installations that buy there."""

    capacity_code = "ZonalAllocationFailed"
    launch_call = "VirtualMachines_CreateOrUpdate"

    def __init__(self, group: Group) -> None:
        self.group = group
        self.fake = group.fake
        self.ours = group.provider(OURS)
        self.theirs = group.provider(THEIRS)

    def now(self) -> datetime:
        """Moves in `wait` alone."""
        return self.group.clock.now()

    async def refuse(self, pattern: str, kind: RefusalKind = "capacity") -> None:
        """In Azure's words."""
        self.fake.faults.add(Fault(kind="refused", call=self.launch_call, offer=pattern, code=REFUSED[kind]))

    async def refuse_nothing(self) -> None:
        """All faults go."""
        self.fake.faults.clear()

    async def lose_next_answer(self) -> None:
        """Of the next call that makes or ends a machine."""
        for call in (self.launch_call, *ENDS):
            self.fake.faults.add(Fault(kind="lost", call=call, left_count=1))

    async def trouble(self, kind: Trouble) -> None:
        """Of every call."""
        self.fake.faults.add(Fault(kind="refused", code=TROUBLE[kind]))

    async def calm(self) -> None:
        """All faults go."""
        self.fake.faults.clear()

    async def show_after(self, seconds: float) -> None:
        """As eventual consistency has it."""
        self.fake.machines.shown_after_seconds = seconds

    async def end_unexpectedly(self, provider_id: ProviderId) -> None:
        """Evicted while it boots: nothing of it is left."""
        self.fake.machines.evict(provider_id.removeprefix("azure://"))

    async def stock(self, wanted: Order, count: int) -> None:
        """One is launched, the others are copies of it."""
        made = await self.ours.launch(wanted)
        self.fake.machines.stock(made.provider_id.removeprefix("azure://"), count - 1)

    async def stranger(self, wanted: Order) -> ProviderId:
        """Its tags are taken off."""
        made = await self.ours.launch(wanted)
        machine = self.fake.machines.get(made.provider_id.removeprefix("azure://"))
        assert machine is not None
        machine.tags.clear()
        return made.provider_id

    async def wait(self, seconds: float) -> None:
        """At once."""
        self.group.clock.turn(seconds)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[AzureRig]:
    """A resource group, and two installations that buy there."""
    async with served_group(tmp_path) as group:
        made = AzureRig(group)
        yield made
        await made.ours.close()
        await made.theirs.close()


@pytest.mark.cloud(
    "azure",
    calls=(
        "VirtualMachines_CreateOrUpdate",
        "VirtualMachines_Delete",
        "VirtualMachines_Get",
        "VirtualMachines_List",
        "VirtualMachineScaleSets_Get",
        "Operations_Get",
        "ResourceSkus_List",
        "Usage_List",
        "RetailPrices_List",
    ),
    errors=("answer lost", "answer late", "region down", "instance dies while booting"),
)
class TestAzure(ProviderContract):
    """The inherited promises; the fixture is the module's."""


async def test_never_two_launches_for_one_token(rig: AzureRig) -> None:
    """Whatever was lost, refused or repeated: the fake counts one launch per action."""
    await rig.lose_next_answer()
    orders = [await order(rig, f"a{number}") for number in range(4)]
    for _ in range(3):
        await asyncio.gather(*(rig.ours.launch(each) for each in orders), return_exceptions=True)
    names = Counter(call.parameters["name"] for call in rig.fake.asked_of("VirtualMachines_CreateOrUpdate"))
    assert len(names) == rig.fake.launches_count == len(orders)


@pytest.mark.cloud("azure", calls=("VirtualMachineScaleSets_Update",), errors=("killed between call and answer",))
@pytest.mark.parametrize("answer", ["told", "lost"])
async def test_a_used_token_never_launches_again_after_a_restart(rig: AzureRig, answer: str) -> None:
    """The process died after the call and the machine is gone: only the scale set's launch log knows the order."""
    wanted = await order(rig)
    name = FlexibleScaleSet.name_of(wanted)
    if answer == "told":
        await rig.ours.launch(wanted)
    else:
        await rig.lose_next_answer()
        with pytest.raises(TransientError):
            await rig.ours.launch(wanted)
    began_at = rig.now()
    await rig.wait(30)
    rig.fake.machines.evict(rig.fake.id_of("virtualMachines", name))
    evicted_at = rig.now()
    another = rig.group.provider(OURS)
    with pytest.raises(TransientError, match="is recorded"):  # somebody may be about to make it
        await another.launch(wanted)
    await rig.wait(60)
    again = await another.launch(wanted)
    (listed,) = await another.instances(OURS)
    await another.close()
    assert again.provider_id.endswith(name)
    assert (again.state, again.launched_at, again.terminated_at) == ("terminated", began_at, evicted_at)
    assert listed == again
    assert rig.fake.launches_count == 1


async def test_a_recorded_order_without_a_machine_is_launched(rig: AzureRig) -> None:
    """The write's answer was lost, then Azure throttled: nothing was created, and a retry creates it."""
    wanted = await order(rig)
    rig.fake.faults.add(Fault(kind="lost", call="VirtualMachineScaleSets_Update", left_count=1))
    throttled = Fault(kind="refused", call="VirtualMachines_CreateOrUpdate", code="TooManyRequests", left_count=1)
    rig.fake.faults.add(throttled)
    for _ in range(2):
        with pytest.raises(TransientError):
            await rig.ours.launch(wanted)
    assert (await rig.ours.launch(wanted)).state in ("pending", "running")
    assert rig.fake.launches_count == 1


async def test_an_order_without_a_writable_scale_set_is_refused(rig: AzureRig) -> None:
    """With the setting, or the missing permission; no machine is requested."""
    nowhere = rig.group.provider(OURS, scale_set="nowhere")
    with pytest.raises(LaunchRefused, match="scale set nowhere not found") as refused:
        await nowhere.launch(await order(rig))
    await nowhere.close()
    assert refused.value.kind == "configuration"
    rig.fake.faults.add(Fault(kind="refused", call="VirtualMachineScaleSets_Update", code="AuthorizationFailed"))
    with pytest.raises(LaunchRefused, match=r"allow Microsoft\.Compute/virtualMachineScaleSets/write") as denied:
        await rig.ours.launch(await order(rig))
    assert denied.value.kind == "permission"
    assert not rig.fake.asked_of("VirtualMachines_CreateOrUpdate")


async def test_concurrent_orders_share_writes(rig: AzureRig) -> None:
    """Also while others write to the set: forty orders of two installations are all recorded."""
    orders = [await order(rig, f"a{number}") for number in range(20)]
    others = [await order(rig, f"a{number}", installation=THEIRS) for number in range(20)]
    await asyncio.gather(*(rig.ours.launch(each) for each in orders), *(rig.theirs.launch(other) for other in others))
    tags = rig.fake.scale_sets.get("gpu")["tags"]
    launches = decode_launches(text for name, text in tags.items() if name.startswith(LAUNCH_LOG_TAG))
    assert launches.keys() == {launch_digest(FlexibleScaleSet.name_of(each)) for each in (*orders, *others)}
    assert len(rig.fake.asked_of("VirtualMachineScaleSets_Update")) < 20


def test_the_newest_orders_are_recorded() -> None:
    """As many as the set's tags hold; tags written by people do no harm."""
    at = datetime(2026, 11, 22, tzinfo=UTC)
    launches = {launch_digest(str(number)): at + timedelta(seconds=number) for number in range(ORDERS_MAX + 10)}
    texts = encode_launches(launches)
    assert len(texts) == TAGS_MAX
    assert all(len(text) <= TAG_LENGTH_MAX for text in texts)
    assert decode_launches(["hello", "\N{SNOWMAN}", *texts]) == dict(list(launches.items())[10:])


async def test_an_eviction_is_dated_by_the_activity_log(rig: AzureRig) -> None:
    """Azure shows nothing of a deleted machine; our own deletions are dated by their operation."""
    evicted, ended = [await rig.ours.launch(await order(rig, action)) for action in ("a1", "a2")]
    await rig.wait(100)
    await rig.end_unexpectedly(evicted.provider_id)
    await rig.ours.terminate(ended.provider_id, now=rig.now())
    at = rig.now()
    await rig.wait(50)
    assert {instance.terminated_at for instance in await rig.ours.instances(OURS)} == {at}


async def test_without_the_log_an_eviction_is_dated_when_missed(rig: AzureRig) -> None:
    """Late by one list interval, and no list fails for it."""
    made = await rig.ours.launch(await order(rig))
    await rig.wait(100)
    await rig.end_unexpectedly(made.provider_id)
    rig.fake.faults.add(Fault(kind="refused", call="ActivityLogs_List", code="AuthorizationFailed"))
    await rig.wait(50)
    assert [instance.terminated_at for instance in await rig.ours.instances(OURS)] == [rig.now()]


async def test_a_machine_is_tagged_with_its_owner(rig: AzureRig) -> None:
    """Installation, action, pool and agreed price; it belongs to the scale set, and its disk is deleted with it."""
    wanted = await order(rig)
    await rig.ours.launch(wanted)
    body = rig.fake.asked_of("VirtualMachines_CreateOrUpdate")[0].body
    assert body["tags"]["gpu-autoscaler.io_installation"] == OURS
    assert body["tags"]["gpu-autoscaler.io_action-id"] == wanted.action_id
    assert body["tags"]["gpu-autoscaler.io_pool"] == wanted.pool
    assert body["properties"]["virtualMachineScaleSet"]["id"].endswith("/virtualMachineScaleSets/gpu")
    assert body["properties"]["storageProfile"]["osDisk"]["deleteOption"] == "Delete"


async def test_evicted_spot_is_deleted_and_has_no_ceiling(rig: AzureRig) -> None:
    """No maximum price, so that it is never evicted for its price."""
    spot = next(offer for offer in await rig.ours.offers() if offer.capacity_type is CapacityType.SPOT)
    made = await rig.ours.launch(msgspec.structs.replace(await order(rig), offer=spot))
    properties = rig.fake.asked_of("VirtualMachines_CreateOrUpdate")[0].body["properties"]
    assert made.capacity_type is CapacityType.SPOT
    assert (properties["priority"], properties["evictionPolicy"]) == ("Spot", "Delete")
    assert properties["billingProfile"] == {"maxPrice": -1}


@pytest.mark.cloud("azure", errors=("MaxPriceTooLow",))
async def test_spot_prices_are_limited_by_ceilings(rig: AzureRig) -> None:
    """The ceiling is sent with the launch; offers above it are unavailable, and Azure refuses an order after a
    price rise."""
    first = next(offer for offer in await rig.ours.offers() if offer.capacity_type is CapacityType.SPOT)
    ceiling = f"{first.instance_type}={(first.price_micro_usd_per_hour or 0) / 1e6 + 0.00002:.6f}"
    buyer = rig.group.provider(OURS, spot_ceilings=(ceiling, "Standard_X*=1"))
    cheap = {offer.key: offer for offer in await buyer.offers()}[first.key]
    await buyer.launch(msgspec.structs.replace(await order(rig), offer=cheap))
    said = {one.subject: one.message for one in await buyer.preflight()}

    rig.fake.spot_ratio_of = lambda _: 2.0
    with pytest.raises(LaunchRefused) as refused:
        await buyer.launch(msgspec.structs.replace(await order(rig, "a2"), offer=cheap))
    await rig.wait(3601)
    offers = {offer.key: offer for offer in await buyer.offers()}
    await buyer.close()
    asked = rig.fake.asked_of("VirtualMachines_CreateOrUpdate")[0].body["properties"]
    most_usd = asked["billingProfile"]["maxPrice"]
    assert 0 <= most_usd * 1e6 - (cheap.price_micro_usd_per_hour or 0) <= 20
    assert (cheap.unavailable_by, offers[cheap.key].unavailable_by) == (None, UnavailabilityCause.CEILING)
    assert {offer.unavailable_by for offer in offers.values() if offer.instance_type != cheap.instance_type} == {None}
    assert (refused.value.kind, refused.value.code) == ("capacity", "MaxPriceTooLow")
    assert "matches no spot offer" in said["azure.spot_ceilings Standard_X*"]


async def test_a_failed_allocation_is_cleaned_up_before_it_is_reported(rig: AzureRig) -> None:
    """The failed machine is deleted and verified to be gone, and its name is free to launch later."""
    wanted = await order(rig)
    await rig.refuse("*")
    with pytest.raises(LaunchRefused):
        await rig.ours.launch(wanted)
    assert len(rig.fake.asked_of("VirtualMachines_Delete")) == 1
    assert not list(rig.fake.machines.there())


async def test_a_lost_allocation_failure_is_reported_on_retry(rig: AzureRig) -> None:
    """The instance reports why it failed."""
    wanted = await order(rig)
    rig.fake.faults.add(Fault(kind="lost", call="VirtualMachines_CreateOrUpdate", left_count=1))
    await rig.refuse("*")
    with pytest.raises(TransientError):
        await rig.ours.launch(wanted)
    with pytest.raises(LaunchRefused, match="ZonalAllocationFailed"):
        await rig.ours.launch(wanted)
    assert not list(rig.fake.machines.there())


async def test_offers_above_a_quota_are_unavailable(rig: AzureRig) -> None:
    """By family and region for on-demand, by one quota for spot, named in the offer; ending machines free it."""
    rig.fake.quota_vcpus["lowPriorityCores"] = 0
    rig.fake.quota_vcpus["cores"] = 4
    room = next(offer for offer in await rig.ours.offers() if offer.unavailable_because is None)
    made = await rig.ours.launch(msgspec.structs.replace(await order(rig), offer=room))
    full = {offer.key: offer.unavailable_because for offer in await rig.ours.offers()}
    await rig.ours.terminate(made.provider_id, now=rig.now())
    await rig.wait(10)
    again = [offer for offer in await rig.ours.offers() if offer.unavailable_because is None]
    assert {offer.instance_type for offer in again} == {"Standard_NC4as_T4_v3"}
    assert {offer.capacity_type for offer in again} == {CapacityType.ON_DEMAND}
    assert "quota cores is 4 vCPUs with 4 in use" in str(full["Standard_NC4as_T4_v3/westeurope-1/on-demand"])
    assert None not in full.values()


async def test_a_price_has_its_source_and_age(rig: AzureRig, tmp_path: Path) -> None:
    """A file has its modification date; prices of a silent price list become dated, and stay."""
    began, path = rig.now(), tmp_path / "prices.json"
    path.write_text('{"Standard_NC4as_T4_v3/*/spot": 0.1}', encoding="utf-8")
    os.utime(path, (began.timestamp() - 86_400, began.timestamp() - 86_400))
    provider = rig.group.provider(OURS, prices_path=str(path))
    first = {offer.key: offer for offer in await provider.offers()}
    rig.fake.faults.add(Fault(kind="refused", call="RetailPrices_List", code="TooManyRequests"))
    await rig.wait(7200 + 60)
    later = {offer.key: offer for offer in await provider.offers()}
    await provider.close()
    listed, filed = (f"Standard_NC4as_T4_v3/westeurope-1/{of}" for of in ("on-demand", "spot"))
    assert (first[filed].price_source, first[filed].priced_at) == ("price file", began - timedelta(days=1))
    assert (first[listed].price_source, first[listed].priced_at) == ("retail prices", None)
    assert (later[listed].price_micro_usd_per_hour, later[listed].priced_at) == (526_000, began)


async def test_without_permission_the_built_in_sizes_are_used(rig: AzureRig) -> None:
    """Offered in every zone until refused; prices are public."""
    rig.fake.faults.add(Fault(kind="refused", call="ResourceSkus_List", code="AuthorizationFailed"))
    offers = {offer.key: offer for offer in await rig.ours.offers()}
    assert len(offers) == 2 * 3 * 2  # sizes, zones, capacity types
    offer = offers["Standard_NC4as_T4_v3/westeurope-2/on-demand"]
    assert (offer.gpu_model, offer.resources.gpu_count, offer.price_micro_usd_per_hour) == ("T4", 1, 526_000)


async def test_a_link_to_another_host_is_not_followed(rig: AzureRig) -> None:
    """Our token would be sent there."""
    provider = rig.group.provider(OURS)
    calls = provider._client
    with pytest.raises(PermanentError, match="not followed"):
        await calls._follow("x", "http://127.0.0.1:1/next", calls._rest, rig.group.url)
    await provider.close()


async def test_an_unknown_field_is_refused(rig: AzureRig) -> None:
    """In the machine file, by its path: the fake checks requests against Azure's own types."""
    machine = json.loads(rig.group.machine_path.read_text(encoding="utf-8"))
    machine["storageProfile"]["osDisk"]["size"] = 100
    rig.group.machine_path.write_text(json.dumps(machine), encoding="utf-8")
    provider = rig.group.provider(OURS)
    with pytest.raises(LaunchRefused, match=r"storageProfile\.osDisk\.size") as refused:
        await provider.launch(await order(rig))
    await provider.close()
    assert refused.value.kind == "configuration"
