"""`doctor` on Azure: findings and next steps."""

import json
from pathlib import Path

import pytest
from tests.support.azure import served_group

from gpu_autoscaler.providers.azure.permissions import CALLS
from gpu_autoscaler.providers.azure.preflight import needed_role
from gpu_autoscaler.simcloud.faults import Fault

pytestmark = pytest.mark.timeout(120)


async def test_a_valid_configuration_has_no_errors(tmp_path: Path) -> None:
    """Credentials, scale set, quotas and offers; nothing is launched or changed."""
    async with served_group(tmp_path) as group:
        provider = group.provider("ours")
        findings = await provider.preflight()
        await provider.close()
        writes = [call for call in group.fake.asked if CALLS.get(call.name) and CALLS[call.name].method != "GET"]
    assert {finding.level for finding in findings} == {"ok"}
    assert [finding.subject for finding in findings][:2] == ["credentials", "permissions"]
    assert findings[-1].message == "12 of 2 types, 6 spot"
    assert not writes


async def test_each_error_has_its_next_step(tmp_path: Path) -> None:
    """Automatic repairs, a missing scale set, a pattern without a match, a quota of zero."""
    async with served_group(tmp_path) as group:
        group.fake.scale_sets.get("gpu")["properties"]["automaticRepairsPolicy"] = {"enabled": True}
        provider = group.provider("ours", scale_sets=("training=nowhere",))
        findings = {finding.subject: finding for finding in await provider.preflight()}
        await provider.close()
        del group.fake.scale_sets.get("gpu")["properties"]["automaticRepairsPolicy"]
        group.fake.quota_vcpus["lowPriorityCores"] = 0
        provider = group.provider("ours", instance_types=("Standard_NC4as_T4_v3", "Standard_XY*"))
        later = {finding.subject: finding for finding in await provider.preflight()}
        await provider.close()
    assert "automatic repairs are on" in findings["azure scale set gpu"].message
    assert "not found" in findings["azure scale set nowhere"].message
    assert later["azure.instance_types Standard_XY*"].level == "warning"
    assert later["quota lowPriorityCores"].next_step == "request an increase in the portal"


async def test_a_missing_permission_is_named(tmp_path: Path) -> None:
    """With the action to grant; without read access nothing else is checked."""
    async with served_group(tmp_path) as group:
        group.fake.faults.add(Fault(kind="refused", call="VirtualMachines_List", code="AuthorizationFailed"))
        provider = group.provider("ours")
        (finding,) = await provider.preflight()
        await provider.close()
    assert finding.level == "error"
    assert "Microsoft.Compute/virtualMachines/read" in finding.next_step


@pytest.mark.cloud("azure", calls=("Permissions_ListForResourceGroup",))
async def test_permissions_to_buy_and_remove_are_checked_without_using_them(tmp_path: Path) -> None:
    """A role with notActions, a role of another scope, and a refused permission query."""
    async with served_group(tmp_path) as group:
        group.fake.permissions = [
            {"actions": ["Microsoft.Compute/*", "Microsoft.Network/*/join/action"], "notActions": []}
        ]
        provider = group.provider("ours")
        elsewhere = {finding.subject: finding for finding in await provider.preflight()}
        group.fake.permissions = [
            {"actions": ["*"], "notActions": ["microsoft.compute/virtualMachines/DELETE"]},
            {"actions": ["*/read"]},
        ]
        missing = {finding.subject: finding for finding in await provider.preflight()}
        group.fake.faults.add(
            Fault(kind="refused", call="Permissions_ListForResourceGroup", code="AuthorizationFailed")
        )
        unknown = {finding.subject: finding for finding in await provider.preflight()}
        await provider.close()
    assert elsewhere["VirtualMachines_CreateOrUpdate"].level == "warning"
    assert "Microsoft.Network/networkInterfaces/write" in elsewhere["VirtualMachines_CreateOrUpdate"].next_step
    assert (missing["VirtualMachines_Delete"].level, "VirtualMachines_CreateOrUpdate" in missing) == ("error", False)
    assert "never terminated" in missing["VirtualMachines_Delete"].message
    assert "allow Microsoft.Compute/virtualMachines/delete; `" in missing["VirtualMachines_Delete"].next_step
    assert (unknown["permissions"].level, "permissions" in missing) == ("warning", False)


@pytest.mark.cloud("azure", calls=("VirtualMachineImages_List",))
async def test_an_unavailable_image_is_reported(tmp_path: Path) -> None:
    """By SKU or version; custom images are not checked."""
    async with served_group(tmp_path) as group:
        for image, level in (
            ({"publisher": "microsoft-dsvm", "offer": "ubuntu-hpc", "sku": "1804", "version": "latest"}, "error"),
            ({"publisher": "microsoft-dsvm", "offer": "ubuntu-hpc", "sku": "2204", "version": "1.0.0"}, "error"),
            ({"id": "/subscriptions/x/resourceGroups/y/providers/Microsoft.Compute/images/z"}, None),
        ):
            machine = json.loads(group.machine_path.read_text(encoding="utf-8"))
            machine["storageProfile"]["imageReference"] = image
            group.machine_path.write_text(json.dumps(machine), encoding="utf-8")
            provider = group.provider("ours")
            found = {finding.subject.partition(" ")[0]: finding.level for finding in await provider.preflight()}
            await provider.close()
            assert found.get("image") == level


@pytest.mark.cloud("azure", errors=("clock skew", "group of Azure's own autoscale"))
async def test_wrong_names_clock_and_other_autoscalers_are_reported(tmp_path: Path) -> None:
    """An unknown group, subscription or region; a wrong clock; a scale set that Azure scales."""
    async with served_group(tmp_path) as group:
        wrong = {"resource_group": "nowhere", "subscription": "11111111-0000-4000-8000-000000000000"}
        for name, value in wrong.items():
            provider = group.provider("ours", **{name: value})
            (finding,) = await provider.preflight()
            await provider.close()
            assert (finding.level, f"azure.{name}" in finding.next_step, value in finding.message) == (
                "error",
                True,
                True,
            )
        provider = group.provider("ours", region="northeurope")
        elsewhere = {finding.subject: finding for finding in await provider.preflight()}
        await provider.close()
        group.fake.clock_ahead_seconds = -120.0
        target = group.fake.id_of("virtualMachineScaleSets", "gpu")
        setting = {"name": "cpu-rule", "properties": {"enabled": True, "targetResourceUri": target}}
        group.fake.autoscale_settings = [setting]
        provider = group.provider("ours")
        found = {finding.subject: finding for finding in await provider.preflight()}
        await provider.close()
    assert "set azure.region to that" in elsewhere["azure scale set gpu"].message
    assert "s ahead of Azure's" in found["clock"].message
    assert "cpu-rule" in found["azure scale set gpu"].message


async def test_the_role_has_what_the_settings_need(tmp_path: Path) -> None:
    """No actions for uniform scale sets unless one is configured."""
    async with served_group(tmp_path) as group:
        flexible = json.loads(needed_role(group.options()))
        uniform = json.loads(needed_role(group.options(scale_sets=("training=a100",))))
    assert "Microsoft.Compute/virtualMachines/write" in flexible["Actions"]
    assert "Microsoft.Compute/virtualMachineScaleSets/delete/action" not in flexible["Actions"]
    assert "Microsoft.Compute/virtualMachineScaleSets/delete/action" in uniform["Actions"]
