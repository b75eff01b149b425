"""Azure's own SDK works against the simulated Azure."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.azure import REGION, Group, served_group

from gpu_autoscaler.simcloud.azure.fake import GROUP, SUBSCRIPTION
from gpu_autoscaler.simcloud.azure.market import MACHINE
from gpu_autoscaler.simcloud.faults import Fault

compute = pytest.importorskip("azure.mgmt.compute", reason="NOT RUN: azure-mgmt-compute is not installed (`fakes`)")
pytestmark = pytest.mark.timeout(120)


class Sdk:
    """Azure's client of one group; each call in a thread, as the fake answers in this loop."""

    def __init__(self, group: Group) -> None:
        from azure.core.credentials import AccessToken  # noqa: PLC0415 - an extra
        from azure.core.pipeline.policies import HeadersPolicy  # noqa: PLC0415 - as above

        class Nobody:
            """A credential that is never asked: tokens do not go where there is no TLS."""

            def get_token(self, *_: str, **__: object) -> AccessToken:
                return AccessToken("fake", 2**31)

        self.group = group
        self.client: Any = compute.ComputeManagementClient(
            Nobody(),
            SUBSCRIPTION,
            base_url=group.url,
            authentication_policy=HeadersPolicy({"Authorization": "Bearer fake"}),
            polling_interval=0,
            retry_total=0,
        )

    async def do(self, call: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - the client's own types
        """Return what the client returns."""
        return await asyncio.to_thread(call, self.client)


@pytest.fixture
async def sdk(tmp_path: Path) -> AsyncIterator[Sdk]:
    """A client of an empty group."""
    async with served_group(tmp_path) as group:
        made = Sdk(group)
        yield made
        made.client.close()


def machine(**more: object) -> dict[str, object]:
    """What the client sends."""
    properties = {
        **MACHINE,
        "hardwareProfile": {"vmSize": "Standard_NC4as_T4_v3"},
        "priority": "Spot",
        "evictionPolicy": "Delete",
        "billingProfile": {"maxPrice": -1},
        **more,
    }
    return {"location": REGION, "zones": ["1"], "tags": {"team": "vision"}, "properties": properties}


async def test_a_machine_is_created_and_deleted(sdk: Sdk) -> None:
    """Created, read with its instance view, listed, deleted by a long-running operation."""
    made = await sdk.do(lambda c: c.virtual_machines.begin_create_or_update(GROUP, "gpu-1", machine()).result())
    assert (made.name, made.provisioning_state, made.zones) == ("gpu-1", "Succeeded", ["1"])
    read = await sdk.do(lambda c: c.virtual_machines.get(GROUP, "gpu-1", expand="instanceView"))
    assert read.instance_view.statuses[0].code == "ProvisioningState/succeeded"
    assert [one.name for one in await sdk.do(lambda c: list(c.virtual_machines.list(GROUP)))] == ["gpu-1"]
    await sdk.do(lambda c: c.virtual_machines.begin_delete(GROUP, "gpu-1").result())
    sdk.group.clock.turn(60)
    assert await sdk.do(lambda c: list(c.virtual_machines.list(GROUP))) == []


async def test_a_failed_allocation_fails_the_operation(sdk: Sdk) -> None:
    """The SDK raises it with Azure's code; the machine remains in state failed."""
    from azure.core.exceptions import HttpResponseError  # noqa: PLC0415 - an extra

    sdk.group.fake.faults.add(Fault(kind="refused", call="VirtualMachines_CreateOrUpdate", code="AllocationFailed"))
    with pytest.raises(HttpResponseError, match="AllocationFailed"):
        await sdk.do(lambda c: c.virtual_machines.begin_create_or_update(GROUP, "gpu-1", machine()).result())
    left = await sdk.do(lambda c: c.virtual_machines.get(GROUP, "gpu-1"))
    assert left.provisioning_state == "Failed"


async def test_a_uniform_set_grows_and_loses_a_named_machine(sdk: Sdk) -> None:
    """With its ETag; the machine list is paged."""
    body = {
        "location": REGION,
        "zones": ["1"],
        "sku": {"name": "Standard_NC4as_T4_v3", "tier": "Standard", "capacity": 501},
        "properties": {"overprovision": False, "orchestrationMode": "Uniform"},
    }
    await sdk.do(lambda c: c.virtual_machine_scale_sets.begin_create_or_update(GROUP, "t4", body).result())
    members = await sdk.do(lambda c: list(c.virtual_machine_scale_set_vms.list(GROUP, "t4")))
    ids = {"instanceIds": [members[0].instance_id]}
    await sdk.do(lambda c: c.virtual_machine_scale_sets.begin_delete_instances(GROUP, "t4", ids).result())
    read = await sdk.do(lambda c: c.virtual_machine_scale_sets.get(GROUP, "t4"))
    assert (len(members), read.sku.capacity) == (501, 500)


async def test_tags_of_a_flexible_set_are_written_with_its_etag(sdk: Sdk) -> None:
    """A write with an outdated ETag is refused; no machine is created."""
    from azure.core import MatchConditions  # noqa: PLC0415 - an extra
    from azure.core.exceptions import ResourceModifiedError  # noqa: PLC0415 - as above

    def write(client: Any, etag: str, team: str) -> Any:  # noqa: ANN401 - the client's own types
        condition = {"etag": etag, "match_condition": MatchConditions.IfNotModified}
        return client.virtual_machine_scale_sets.begin_update(
            GROUP, "gpu", {"tags": {"team": team}}, **condition
        ).result()

    read = await sdk.do(lambda c: c.virtual_machine_scale_sets.get(GROUP, "gpu"))
    written = await sdk.do(lambda c: write(c, read.etag, "vision"))
    with pytest.raises(ResourceModifiedError):
        await sdk.do(lambda c: write(c, read.etag, "speech"))
    assert (written.tags, sdk.group.fake.launches_count) == ({"team": "vision"}, 0)


async def test_image_versions_can_be_read(sdk: Sdk) -> None:
    """The known image has versions; another is not found."""
    from azure.core.exceptions import ResourceNotFoundError  # noqa: PLC0415 - an extra

    image = MACHINE["storageProfile"]["imageReference"]
    parts = (image["publisher"], image["offer"], image["sku"])
    versions = await sdk.do(lambda c: [one.name for one in c.virtual_machine_images.list(REGION, *parts)])
    assert len(versions) == 2
    with pytest.raises(ResourceNotFoundError):
        await sdk.do(lambda c: c.virtual_machine_images.list(REGION, "nobody", *parts[1:]))


async def test_sizes_and_quotas_can_be_read(sdk: Sdk) -> None:
    """Capabilities and zones of a size, limits and usage of quotas."""
    sizes = await sdk.do(lambda c: {one.name: one for one in c.resource_skus.list(filter=f"location eq '{REGION}'")})
    told = {capability.name: capability.value for capability in sizes["Standard_ND96asr_v4"].capabilities}
    assert (told["GPUs"], sizes["Standard_ND96asr_v4"].location_info[0].zones) == ("8", ["1", "2", "3"])
    sdk.group.fake.quota_vcpus["cores"] = 8
    quotas = await sdk.do(lambda c: {one.name.value: one for one in c.usage.list(REGION)})
    assert (quotas["cores"].limit, quotas["cores"].current_value) == (8, 0)
