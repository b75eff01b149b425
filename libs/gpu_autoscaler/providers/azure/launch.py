"""Machines of a flexible scale set: each created and deleted by name, which follows from the order's token.

A PUT with If-None-Match creates the machine once. The name of a deleted one is free again, so the order is recorded on
the scale set first (`launch_log.py`) and never created again. A failed allocation leaves a machine behind: it is
deleted and verified to be gone before the order is reported as refused. Sources: Azure REST API, "Virtual Machines -
Create Or Update"; hashicorp/terraform-provider-azurerm, issues 753 and 7516; read 2026-11-22.
"""

import base64
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from gpu_autoscaler.cloudmeta.azure import provider_id_of
from gpu_autoscaler.model.errors import AutoscalerError, TransientError
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.azure.client import AzureClient
from gpu_autoscaler.providers.azure.launch_log import LaunchLog
from gpu_autoscaler.providers.azure.translate import failure, instance_of, refusal_of, tags_of, zones_of
from gpu_autoscaler.providers.files import fill_template
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, instance_from_order, verify_order
from gpu_autoscaler.providers.spot_ceilings import SpotCeilings, usd_text
from gpu_autoscaler.providers.throttling import NotSent
from gpu_autoscaler.providers.tokens import idempotency_token

CREATE = "VirtualMachines_CreateOrUpdate"
# How long another process that recorded an order may take to create its machine, or Azure to list it. A PUT answered
# by 5xx waits as long: its effect is unknown, and a retry under the same name could create a second machine if the
# first one came and was evicted in between.
SETTLED = timedelta(seconds=60)
NETWORK_API_VERSION = "2022-11-01"  # of the network interfaces created with the machine


class FlexibleScaleSet:
    """Launches machines of one flexible scale set, and deletes them."""

    def __init__(
        self,
        client: AzureClient,
        *,
        scale_set: str,
        machine: Mapping[str, Any],
        user_data: str | None,
        ceilings: SpotCeilings,
    ) -> None:
        self._client = client
        self._scale_set_id = client.id_of("virtualMachineScaleSets", scale_set)
        self._launch_log = LaunchLog(client, scale_set)
        self._machine = machine
        self._user_data = user_data
        self._ceilings = ceilings

    @staticmethod
    def name_of(order: Order) -> str:
        """Return the machine's name: unique per order, one per order."""
        return f"gpu-{idempotency_token(order.installation, order.action_id)}"

    async def launch(self, order: Order, now: datetime) -> Instance:
        """Create the machine, or return the one of this name; a deleted one is `terminated`, without a date. Raises
        LaunchRefused, PermanentError, TransientError."""
        name = self.name_of(order)
        recorded_at = await self._launch_log.record(name, now)
        if recorded_at is not None:
            return await self._recorded_machine(order, name, now, recorded_at)
        self._launch_log.creating(name)
        try:
            answer = await self._client.ask(
                CREATE, body=self._body(order, name), headers={"If-None-Match": "*"}, name=name
            )
            if answer.status == 412:
                return await self._recorded_machine(order, name, now, None)
            machine_data = self._client.checked(CREATE, answer).body
        except (NotSent, LaunchRefused):
            self._launch_log.not_created(name)
            raise
        instance = verify_order(instance_of(machine_data, now=now), order)
        failed_with = await self._client.failure_of(answer)
        if failed_with is not None:
            raise await self._delete_failed(name, *failed_with)
        return instance

    async def _recorded_machine(self, order: Order, name: str, now: datetime, recorded_at: datetime | None) -> Instance:
        """Return the machine of an order recorded before; it may have failed since, or be gone."""
        machine_data = await self._client.find("VirtualMachines_Get", query={"$expand": "instanceView"}, name=name)
        if machine_data is None and (recorded_at is None or now - recorded_at < SETTLED):
            raise TransientError(f"{CREATE}: order of {name} is recorded, machine not listed; retried")
        if machine_data is None:
            provider_id = provider_id_of(self._client.id_of("virtualMachines", name))
            return instance_from_order(order, provider_id, launched_at=recorded_at or now, state="terminated")
        instance = verify_order(instance_of(machine_data, now=now), order)
        failed_with = _failure_of(machine_data)
        if failed_with is not None:
            raise await self._delete_failed(name, *failed_with)
        return instance

    async def end(self, name: str) -> None:
        """Delete the machine. Raises PermanentError, TransientError."""
        await self._client.call("VirtualMachines_Delete", name=name)

    async def _delete_failed(self, name: str, code: str, message: str) -> AutoscalerError:
        """Delete the machine of a failed launch; return the refusal once it is gone. Raises TransientError."""
        refusal = failure(CREATE, code, message, of_launch=True)
        if isinstance(refusal, LaunchRefused):
            await self._client.call("VirtualMachines_Delete", name=name)
            if await self._client.find("VirtualMachines_Get", name=name) is not None:
                raise TransientError(f"{name}: {code}: {message}; machine is being deleted, retried")
            self._launch_log.not_created(name)
        return refusal

    def _body(self, order: Order, name: str) -> dict[str, object]:
        """Return a request that follows from order and settings alone, so that a retry is the same request."""
        system = {**self._machine.get("osProfile", {}), "computerName": name}
        if self._user_data is not None:
            system["customData"] = base64.b64encode(fill_template(self._user_data, order).encode()).decode()
        network = {"networkApiVersion": NETWORK_API_VERSION, **self._machine["networkProfile"]}
        properties: dict[str, object] = {
            **self._machine,
            "hardwareProfile": {"vmSize": order.offer.instance_type},
            "virtualMachineScaleSet": {"id": self._scale_set_id},
            "osProfile": system,
            "networkProfile": network,
        }
        if order.offer.capacity_type is CapacityType.SPOT:
            # -1: up to the on-demand price, never evicted for its price (Azure documentation, "Use Azure Spot Virtual
            # Machines", pricing). Delete: an evicted machine that is only deallocated would keep costing its disk.
            ceiling = self._ceilings.of(order.offer.instance_type)
            most_usd = -1 if ceiling is None else float(usd_text(ceiling))
            properties |= {"priority": "Spot", "evictionPolicy": "Delete", "billingProfile": {"maxPrice": most_usd}}
        body: dict[str, object] = {"location": self._client.region, "tags": tags_of(order), "properties": properties}
        zones = zones_of(order.offer.zone)
        return body | {"zones": zones} if zones else body


def _failure_of(machine_data: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return code and message of a failed allocation; None if it succeeded, whatever else is wrong."""
    for status in machine_data["properties"].get("instanceView", {}).get("statuses", ()):
        head, _, code = str(status.get("code", "")).rpartition("/")
        if head == "ProvisioningState/failed" and refusal_of(code, str(status.get("message", ""))) is not None:
            return code, str(status.get("message", ""))
    return None
