"""AWS capacity reservations: offered as prepaid, launched by ID, and drained before a capacity block ends."""

from datetime import timedelta

import msgspec
import pytest
from tests.contract.provider.contract import OURS, order
from tests.contract.provider.test_aws import AwsRig, rig_of

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.offers import CapacityType, Offer, UnavailabilityCause
from gpu_autoscaler.providers.aws.capacity import AwsCapacity
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
    """At its billed price; by its id; one token is one instance; without an end."""
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
    assert (offer.paid_until, offer.unavailable_because) == (None, None)
    assert made.provider_id == listed.provider_id
    assert made.capacity_type is listed.capacity_type is CapacityType.RESERVED
    assert rig.fake.asked_of("RunInstances")[0].parameters[TARGET] == "cr-ours"
    assert rig.fake.reservations.used_count("cr-ours") == 1


async def test_a_capacity_block_is_prepaid_and_ends_early(rig: ReservedRig) -> None:
    """AWS terminates its instances from 30 minutes before its end."""
    rig.have("cr-block", is_block=True, ends_at=rig.now() + DAY)
    provider = rig.provider("cr-block")
    (offer,) = await reserved(provider)
    made = await provider.launch(await ordered(rig, offer))
    await rig.wait((DAY - timedelta(minutes=29)).total_seconds())
    apply_to = await reserved(provider)
    await provider.close()
    asked = rig.fake.asked_of("RunInstances")[0].parameters
    assert offer.price_micro_usd_per_hour == 0
    assert offer.paid_until == rig.now() - timedelta(minutes=1)
    assert made.capacity_type is CapacityType.RESERVED
    assert asked["InstanceMarketOptions.MarketType"] == "capacity-block"
    assert apply_to == []


async def test_a_future_reservation_is_offered_with_its_start(rig: ReservedRig) -> None:
    """The plan has to wait for it."""
    rig.have("cr-soon", is_block=True, starts_at=rig.now() + DAY, ends_at=rig.now() + 2 * DAY)
    provider = rig.provider("cr-soon")
    (offer,) = await reserved(provider)
    await provider.close()
    assert (offer.paid_from, offer.unavailable_because) == (rig.now() + DAY, None)


@pytest.mark.cloud("aws", errors=("ReservationCapacityExceeded",))
async def test_an_exhausted_reservation_is_unavailable(rig: ReservedRig) -> None:
    """Once it is read; refused for capacity until then; available again when an instance ends."""
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
    assert (full.unavailable_by, full.unavailable_because) == (
        UnavailabilityCause.RESERVATION,
        "cr-one is exhausted: 0 of 1 are free",
    )
    assert (free.unavailable_by, free.unavailable_because) == (None, None)


async def test_of_two_equal_reservations_the_free_one_is_offered(rig: ReservedRig) -> None:
    """A token stays bound to the reservation of its order."""
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


async def test_a_removed_reservation_is_refused(rig: ReservedRig) -> None:
    """It is no longer in the settings."""
    rig.have("cr-ours")
    provider, without = rig.provider("cr-ours"), rig.provider()
    (offer,) = await reserved(provider)
    with pytest.raises(PermanentError, match=r"aws\.capacity_reservations") as refused:
        await without.launch(await ordered(rig, offer))
    assert isinstance(refused.value, LaunchRefused)
    assert await reserved(without) == []
    await provider.close()
    await without.close()


async def test_unreadable_reservations_do_not_block_other_offers(rig: ReservedRig) -> None:
    """Doctor names the permission, and each unusable reservation."""
    rig.have("cr-other-zone", zone="eu-west-1b")
    subnet = rig.region.subnets[0]
    provider = rig.region.provider(OURS, capacity_reservations=("cr-other-zone", "cr-gone"), subnets=(subnet,))
    found = {one.subject: one for one in await provider.preflight()}
    rig.fake.faults.add(Fault(kind="refused", call="DescribeCapacityReservations", code="UnauthorizedOperation"))
    offers = await provider.offers()
    denied = {one.subject: one for one in await provider.preflight()}["DescribeCapacityReservations"]
    await provider.close()
    assert "has no subnet" in found["aws.capacity_reservations cr-other-zone"].message
    assert "not found in eu-west-1" in found["aws.capacity_reservations cr-gone"].message
    assert offers
    assert "ec2:DescribeCapacityReservations" in denied.next_step
