"""What is reserved with AWS is offered as paid, launched into by its name, and left before a block's end."""

from datetime import timedelta

import msgspec
import pytest
from tests.contract.provider.contract import OURS, order
from tests.contract.provider.test_aws import AwsRig, rig_of

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.offers import Bar, CapacityType, Offer
from gpu_autoscaler.providers.aws import AwsCapacity
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.simcloud.aws.reservations import TARGET, Reserved
from gpu_autoscaler.simcloud.faults import Fault

pytestmark = [pytest.mark.timeout(180), pytest.mark.cloud("aws", calls=("DescribeCapacityReservations",))]
DAY = timedelta(days=1)


class ReservedRig(AwsRig):
    """A region with reservations, of which ours are named in the settings."""

    def have(self, name: str, **more: object) -> None:
        """Have one of two T4 machines that began yesterday."""
        fitting = {"instance_type": "g4dn.xlarge", "zone": "eu-west-1a", "count": 2, "starts_at": self.now() - DAY}
        self.fake.reservations.put(Reserved(reservation_id=name, **(fitting | more)))  # type: ignore[arg-type]

    def provider(self, *names: str) -> AwsCapacity:
        """A driver that may use these."""
        return self.region.provider(OURS, capacity_reservations=names)


rig = rig_of(ReservedRig)


async def reserved(provider: AwsCapacity) -> list[Offer]:
    """What is offered as reserved."""
    return [offer for offer in await provider.offers() if offer.capacity_type is CapacityType.RESERVED]


async def ordered(rig: ReservedRig, offer: Offer, action: str = "a1") -> Order:
    """An order of this offer."""
    return msgspec.structs.replace(await order(rig, action), offer=offer)


async def test_a_reservation_is_offered_and_launched_into(rig: ReservedRig) -> None:
    """At the price that it is billed at; by its name; one token is one instance; nobody's end is near."""
    rig.have("cr-ours")
    rig.have("cr-others", zone="eu-west-1b")
    provider = rig.provider("cr-ours")
    (offer,) = await reserved(provider)
    wanted = await ordered(rig, offer)
    rig.fake.faults.add(Fault(kind="lost", call="RunInstances", left_count=1))
    with pytest.raises(TransientError):
        await provider.launch(wanted)
    made = await provider.launch(wanted)
    (listed,) = await provider.instances(OURS)
    await provider.close()
    assert (offer.key, offer.price_micro_usd_per_hour) == ("g4dn.xlarge/eu-west-1a/reserved", 526_000)
    assert (offer.paid_until, offer.barred_because) == (None, None)
    assert made.provider_id == listed.provider_id
    assert made.capacity_type is listed.capacity_type is CapacityType.RESERVED
    assert rig.fake.asked_of("RunInstances")[0].parameters[TARGET] == "cr-ours"
    assert rig.fake.reservations.used_count("cr-ours") == 1


async def test_a_block_is_paid_in_advance_and_over_half_an_hour_before_its_end(rig: ReservedRig) -> None:
    """AWS ends its instances from then on; bought as what it is."""
    rig.have("cr-block", is_block=True, ends_at=rig.now() + DAY)
    provider = rig.provider("cr-block")
    (offer,) = await reserved(provider)
    made = await provider.launch(await ordered(rig, offer))
    await rig.wait((DAY - timedelta(minutes=29)).total_seconds())
    over = await reserved(provider)
    await provider.close()
    asked = rig.fake.asked_of("RunInstances")[0].parameters
    assert offer.price_micro_usd_per_hour == 0
    assert offer.paid_until == rig.now() - timedelta(minutes=1)
    assert made.capacity_type is CapacityType.RESERVED
    assert asked["InstanceMarketOptions.MarketType"] == "capacity-block"
    assert over == []


async def test_what_is_to_come_is_shown_with_its_beginning(rig: ReservedRig) -> None:
    """It is for the plan to wait for it."""
    rig.have("cr-soon", is_block=True, starts_at=rig.now() + DAY, ends_at=rig.now() + 2 * DAY)
    provider = rig.provider("cr-soon")
    (offer,) = await reserved(provider)
    await provider.close()
    assert (offer.paid_from, offer.barred_because) == (rig.now() + DAY, None)


@pytest.mark.cloud("aws", errors=("ReservationCapacityExceeded",))
async def test_what_is_used_up_is_barred_and_refused(rig: ReservedRig) -> None:
    """Barred once it is read; refused for capacity until then; free again when something of it ends."""
    rig.have("cr-one", count=1)
    provider = rig.provider("cr-one")
    (offer,) = await reserved(provider)
    made = await provider.launch(await ordered(rig, offer))
    with pytest.raises(LaunchRefused) as refused:
        await provider.launch(await ordered(rig, offer, "a2"))
    await rig.wait(60)
    (full,) = await reserved(provider)
    await provider.terminate(made.provider_id, now=rig.now())
    await rig.wait(60)
    (free,) = await reserved(provider)
    await provider.close()
    assert (refused.value.kind, refused.value.code) == ("capacity", "ReservationCapacityExceeded")
    assert (full.barred_by, full.barred_because) == (Bar.RESERVATION, "cr-one is used up: 0 of 1 are free")
    assert (free.barred_by, free.barred_because) == (None, None)


async def test_of_two_alike_the_one_with_room_is_offered(rig: ReservedRig) -> None:
    """A token goes on meaning the one that it was ordered from."""
    rig.have("cr-a", count=1)
    rig.have("cr-b", count=1, starts_at=rig.now() - 2 * DAY)
    provider = rig.provider("cr-a", "cr-b")
    (first,) = await reserved(provider)
    bought = await provider.launch(await ordered(rig, first))
    await rig.wait(60)
    (second,) = await reserved(provider)
    again = await provider.launch(await ordered(rig, first))
    await provider.launch(await ordered(rig, second, "a2"))
    await provider.close()
    assert first.key == second.key
    assert first.paid_from != second.paid_from
    assert again.provider_id == bought.provider_id
    assert [rig.fake.reservations.used_count(name) for name in ("cr-a", "cr-b")] == [1, 1]


async def test_a_reservation_that_is_gone_is_refused_by_name(rig: ReservedRig) -> None:
    """The settings do not have it any more."""
    rig.have("cr-ours")
    provider, without = rig.provider("cr-ours"), rig.provider()
    (offer,) = await reserved(provider)
    with pytest.raises(PermanentError, match=r"aws\.capacity_reservations") as refused:
        await without.launch(await ordered(rig, offer))
    assert isinstance(refused.value, LaunchRefused)
    assert await reserved(without) == []
    await provider.close()
    await without.close()


async def test_reservations_that_may_not_be_read_stop_nothing_else(rig: ReservedRig) -> None:
    """The rest is for sale; doctor names the right, and each reservation that cannot be used."""
    rig.have("cr-other-zone", zone="eu-west-1b")
    subnet = rig.region.subnets[0]
    provider = rig.region.provider(OURS, capacity_reservations=("cr-other-zone", "cr-gone"), subnets=(subnet,))
    found = {one.subject: one for one in await provider.preflight()}
    rig.fake.faults.add(Fault(kind="refused", call="DescribeCapacityReservations", code="UnauthorizedOperation"))
    offers = await provider.offers()
    denied = {one.subject: one for one in await provider.preflight()}["DescribeCapacityReservations"]
    await provider.close()
    assert "without a subnet" in found["aws.capacity_reservations cr-other-zone"].message
    assert "is not in eu-west-1" in found["aws.capacity_reservations cr-gone"].message
    assert offers
    assert "ec2:DescribeCapacityReservations" in denied.next_step
