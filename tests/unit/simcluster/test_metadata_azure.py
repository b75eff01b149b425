"""Azure Scheduled Events of simulated machines, read by our own reader."""

import pytest
from tests.unit.simcluster.test_cloud_http import Rig
from tests.unit.simcluster.test_cloud_http import rig as rig  # noqa: PLC0414 - the fixture, under its name

from gpu_autoscaler.cloudmeta.azure import AzureMetadata
from gpu_autoscaler.model.ids import ProviderId

OWN = ProviderId("azure:///subscriptions/s/resourceGroups/gpu/providers/Microsoft.Compute/virtualMachines/gpu-1")

pytestmark = pytest.mark.timeout(60)


async def test_a_notice_is_a_scheduled_event(rig: Rig) -> None:
    """With the machine's name and deadline; withdrawn, it is no longer listed."""
    name = rig.node()
    machine = rig.cloud.machine_of(name)
    assert machine is not None
    machine.foreign_provider_id = OWN
    metadata = AzureMetadata(rig.session, f"/nodes/{name}")
    before = await metadata.reclaim_notices()
    at = rig.cloud.give_notice(machine)
    (notice,) = await metadata.reclaim_notices()
    rig.cloud.withdraw_notice(machine)
    assert await metadata.provider_id() == OWN
    assert (before, await metadata.reclaim_notices()) == ([], [])
    assert (notice.kind, notice.reclaim_at) == ("terminate", at)


async def test_the_metadata_header_is_required(rig: Rig) -> None:
    """As at Azure, against request forgery."""
    name = rig.node()
    path = f"/nodes/{name}/metadata/scheduledevents?api-version=2020-07-01"
    assert (await rig.send("GET", path))[0] == 400
    assert (await rig.send("POST", path, {"StartRequests": [{"EventId": "e"}]}, Metadata="true"))[0] == 200
