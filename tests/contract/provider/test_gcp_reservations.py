"""Google Cloud reservations: offered as prepaid, selected by name, and refused when they are used up."""

import pytest
from tests.contract.provider.contract import OURS
from tests.support.gcp import Project, served_project

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType, Offer, UnavailabilityCause
from gpu_autoscaler.providers.gcp.capacity import GcpCapacity
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
async def test_a_reservation_is_offered_as_paid_until_exhausted() -> None:
    """At the on-demand price, billed used or not, whatever the quotas; then it is unavailable by its count."""
    async with served_project(("g2-standard-4",)) as project:
        project.fake.quota_gpus |= {"NVIDIA_L4_GPUS": 0, "GPUS_ALL_REGIONS": 0}
        group = project.fake.reserve("ours-2026", "g2-standard-4", ZONE, 1)
        buyer = project.provider(OURS, groups=(*project.groups, group))
        usual = {offer.key: offer for offer in await buyer.offers()}[f"g2-standard-4/{ZONE}/on-demand"]
        offer = await reserved(buyer)
        assert (offer.key, offer.unavailable_because) == (f"g2-standard-4/{ZONE}/reserved", None)
        assert offer.price_micro_usd_per_hour == usual.price_micro_usd_per_hour
        assert (offer.paid_from, offer.paid_until) == (project.clock.now(), None)
        assert usual.unavailable_because is not None

        made = await buyer.launch(order(offer))
        assert made.capacity_type is CapacityType.RESERVED
        assert [instance.capacity_type for instance in await buyer.instances(OURS)] == [CapacityType.RESERVED]
        project.clock.turn(61)
        full = await reserved(buyer)
        assert (full.unavailable_by, "ours-2026 is exhausted: 0 of 1" in str(full.unavailable_because)) == (
            UnavailabilityCause.RESERVATION,
            True,
        )
        assert usual.unavailable_by is UnavailabilityCause.QUOTA
        assert (await examined(project, group))["reservation ours-2026"].level == "warning"
        with pytest.raises(LaunchRefused, match="RESERVATION_CAPACITY_EXCEEDED") as refused:
            await buyer.launch(order(offer, "a2"))
        assert refused.value.kind == "capacity"

        await buyer.terminate(made.provider_id, now=project.clock.now())
        project.clock.turn(61)
        assert ((await reserved(buyer)).unavailable_by, (await reserved(buyer)).unavailable_because) == (None, None)
        await buyer.close()


async def test_a_missing_reservation_makes_its_group_unavailable() -> None:
    """The template names one that does not exist in this zone."""
    async with served_project(("g2-standard-4",)) as project:
        group = project.fake.reserve("ours-2026", "g2-standard-4", ZONE, 4)
        assert (await examined(project, group))["reservation ours-2026"].message == "4 of 4 free, used first"
        project.fake.reservations.clear()
        buyer = project.provider(OURS, groups=(group,))
        gone = await reserved(buyer)
        assert gone.unavailable_by is UnavailabilityCause.NO_RESERVATION
        assert f"ours-2026 not found in {ZONE} of project fake-project" in str(gone.unavailable_because)
        await buyer.close()
        found = (await examined(project, group))["reservation ours-2026"]
    assert (found.level, "reservationAffinity" in found.next_step) == ("error", True)


async def test_unreadable_reservations_are_offered_until_refused() -> None:
    """Unknown is not exhausted."""
    async with served_project(("g2-standard-4",)) as project:
        group = project.fake.reserve("ours-2026", "g2-standard-4", ZONE, 4)
        project.fake.faults.add(Fault(kind="refused", call="reservations.get", code="forbidden"))
        buyer = project.provider(OURS, groups=(group,))
        offer = await reserved(buyer)
        made = await buyer.launch(order(offer))
        await buyer.close()
        found = (await examined(project, group))["reservation ours-2026"]
    assert (offer.unavailable_because, offer.paid_from) == (None, None)
    assert made.capacity_type is CapacityType.RESERVED
    assert "allow compute.reservations.get" in found.next_step
