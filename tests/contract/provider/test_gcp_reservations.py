"""What is reserved at Google Cloud is offered as paid, taken by name, and told when it is used up."""

import pytest
from tests.contract.provider.contract import OURS
from tests.support.gcp import Project, served_project

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import Bar, CapacityType, Offer
from gpu_autoscaler.providers.gcp import GcpCapacity
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.simcloud.faults import Fault

pytestmark = pytest.mark.timeout(180)

ZONE = "europe-west4-a"


async def reserved(buyer: GcpCapacity) -> Offer:
    """The one offer that is."""
    (found,) = [offer for offer in await buyer.offers() if offer.capacity_type is CapacityType.RESERVED]
    return found


def order(offer: Offer, action: str = "a1") -> Order:
    """An order for it."""
    return Order(action_id=ActionId(action), installation=OURS, pool="default", offer=offer, labels=(), taints=())


async def examined(project: Project, *groups: str) -> dict[str, Finding]:
    """What an examination finds, by subject."""
    provider = project.provider(OURS, groups=groups)
    found = {finding.subject: finding for finding in await provider.preflight()}
    await provider.close()
    return found


@pytest.mark.cloud("gcp", calls=("reservations.get",), errors=("RESERVATION_CAPACITY_EXCEEDED",))
async def test_what_is_reserved_is_sold_as_paid_until_it_is_used_up() -> None:
    """At the price of on demand, which is billed used or not, and whatever the quotas say; then it is barred by its
    count, an order for it all the same is refused for want of capacity, and an end makes room again.
    """
    async with served_project(("g2-standard-4",)) as project:
        project.fake.quota_gpus |= {"NVIDIA_L4_GPUS": 0, "GPUS_ALL_REGIONS": 0}
        group = project.fake.reserve("ours-2026", "g2-standard-4", ZONE, 1)
        buyer = project.provider(OURS, groups=(*project.groups, group))
        usual = {offer.key: offer for offer in await buyer.offers()}[f"g2-standard-4/{ZONE}/on-demand"]
        offer = await reserved(buyer)
        assert (offer.key, offer.barred_because) == (f"g2-standard-4/{ZONE}/reserved", None)
        assert offer.price_micro_usd_per_hour == usual.price_micro_usd_per_hour
        assert (offer.paid_from, offer.paid_until) == (project.clock.now(), None)
        assert usual.barred_because is not None

        made = await buyer.launch(order(offer))
        assert made.capacity_type is CapacityType.RESERVED
        assert [instance.capacity_type for instance in await buyer.instances(OURS)] == [CapacityType.RESERVED]
        project.clock.turn(61)
        full = await reserved(buyer)
        assert (full.barred_by, "ours-2026 is used up: 0 of 1" in str(full.barred_because)) == (Bar.RESERVATION, True)
        assert usual.barred_by is Bar.QUOTA
        assert (await examined(project, group))["reservation ours-2026"].level == "warning"
        with pytest.raises(LaunchRefused, match="RESERVATION_CAPACITY_EXCEEDED") as refused:
            await buyer.launch(order(offer, "a2"))
        assert refused.value.kind == "capacity"

        await buyer.terminate(made.provider_id, now=project.clock.now())
        project.clock.turn(61)
        assert ((await reserved(buyer)).barred_by, (await reserved(buyer)).barred_because) == (None, None)
        await buyer.close()


async def test_a_reservation_that_is_not_there_bars_its_group() -> None:
    """The template names what nobody has made, or what another zone has."""
    async with served_project(("g2-standard-4",)) as project:
        group = project.fake.reserve("ours-2026", "g2-standard-4", ZONE, 4)
        assert (await examined(project, group))["reservation ours-2026"].message == "4 of 4 are free, and are used first"
        project.fake.reservations.clear()
        buyer = project.provider(OURS, groups=(group,))
        gone = await reserved(buyer)
        assert gone.barred_by is Bar.NO_RESERVATION
        assert f"ours-2026 is not in {ZONE} of project fake-project" in str(gone.barred_because)
        await buyer.close()
        found = (await examined(project, group))["reservation ours-2026"]
    assert (found.level, "reservationAffinity" in found.next_step) == ("error", True)


async def test_without_the_right_to_read_reservations_they_are_sold_until_refused() -> None:
    """Unknown is not used up."""
    async with served_project(("g2-standard-4",)) as project:
        group = project.fake.reserve("ours-2026", "g2-standard-4", ZONE, 4)
        project.fake.faults.add(Fault(kind="refused", call="reservations.get", code="forbidden"))
        buyer = project.provider(OURS, groups=(group,))
        offer = await reserved(buyer)
        made = await buyer.launch(order(offer))
        await buyer.close()
        found = (await examined(project, group))["reservation ours-2026"]
    assert (offer.barred_because, offer.paid_from) == (None, None)
    assert made.capacity_type is CapacityType.RESERVED
    assert "allow compute.reservations.get" in found.next_step
