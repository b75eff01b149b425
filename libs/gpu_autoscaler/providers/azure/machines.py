"""Machines of a flexible scale set: each made and ended by its own name, which follows from the order's token.

A PUT that says If-None-Match makes the machine once: whoever asks again is told that it is there, and reads it. A
machine that is gone leaves its name free, so an order is written on the scale set before its machine is made
(`begun.py`), and one that stands there is looked for and not made: it has had its machine, or gets none.

What cannot be allocated is told late: the call is taken, the machine stands there as failed, and stays so. Such a
machine is removed, and seen to be gone, before the order is said to be refused.

Sources: Azure REST API, "Virtual Machines - Create Or Update"; hashicorp/terraform-provider-azurerm, reports 753 and
7516 (a failed allocation leaves a machine behind); read 2026-11-22.
"""

import base64
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from gpu_autoscaler.cloudmeta.azure import provider_id_of
from gpu_autoscaler.model.errors import AutoscalerError, TransientError
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.azure.begun import BegunOrders
from gpu_autoscaler.providers.azure.calls import AzureClient
from gpu_autoscaler.providers.azure.translate import failure, instance_of, refusal_of, tags_of, zones_of
from gpu_autoscaler.providers.ceilings import SpotCeilings, usd_text
from gpu_autoscaler.providers.files import fill_template
from gpu_autoscaler.providers.pacing import NotSent
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, instance_from_order, verify_order
from gpu_autoscaler.providers.tokens import idempotency_token

CREATE = "VirtualMachines_CreateOrUpdate"
# How long somebody else who has begun an order may be about to make its machine, or Azure to show it. So long is waited
# after a PUT that was answered by 5xx as well: whether it did anything nobody says, and asked again under the same name
# it could make a second machine for one that came and was taken in between.
SETTLED = timedelta(seconds=60)
NETWORK_API_VERSION = "2022-11-01"  # of the interfaces that the machine brings along


class AzureMachines:
    """Makes machines of one flexible scale set, and removes them."""

    def __init__(
        self,
        calls: AzureClient,
        *,
        scale_set: str,
        machine: Mapping[str, Any],
        user_data: str | None,
        ceilings: SpotCeilings,
    ) -> None:
        self._calls = calls
        self._scale_set_id = calls.id_of("virtualMachineScaleSets", scale_set)
        self._begun = BegunOrders(calls, scale_set)
        self._machine = machine
        self._user_data = user_data
        self._ceilings = ceilings

    @staticmethod
    def name_of(order: Order) -> str:
        """Return the machine's name: no two orders have the same, and no order has two."""
        return f"gpu-{idempotency_token(order.installation, order.action_id)}"

    async def launch(self, order: Order, now: datetime) -> Instance:
        """Make the machine, or return the one of this name; one that is gone is `terminated`, without a date.

        Raises LaunchRefused, PermanentError, TransientError.
        """
        name = self.name_of(order)
        begun_at = await self._begun.begin(name, now)
        if begun_at is not None:
            return await self._found(order, name, now, begun_at)
        self._begun.making(name)
        try:
            began = await self._calls.ask(
                CREATE, body=self._body(order, name), headers={"If-None-Match": "*"}, name=name
            )
            if began.status == 412:
                return await self._found(order, name, now, None)
            told = self._calls.seen(CREATE, began).body
        except (NotSent, LaunchRefused):
            self._begun.unmade(name)
            raise
        made = verify_order(instance_of(told, now=now), order)
        failed = await self._calls.failure_of(began)
        if failed is not None:
            raise await self._withdrawn(name, *failed)
        return made

    async def _found(self, order: Order, name: str, now: datetime, begun_at: datetime | None) -> Instance:
        """Return what became of an order that was begun before; the machine may have failed since, or be gone."""
        told = await self._calls.find("VirtualMachines_Get", query={"$expand": "instanceView"}, name=name)
        if told is None and (begun_at is None or now - begun_at < SETTLED):
            raise TransientError(f"{CREATE}: {name} was begun, and does not show; asked again")
        if told is None:
            provider_id = provider_id_of(self._calls.id_of("virtualMachines", name))
            return instance_from_order(order, provider_id, launched_at=begun_at or now, state="terminated")
        made = verify_order(instance_of(told, now=now), order)
        failed = _failure_of(told)
        if failed is not None:
            raise await self._withdrawn(name, *failed)
        return made

    async def end(self, name: str) -> None:
        """Begin the machine's end. Raises PermanentError, TransientError."""
        await self._calls.call("VirtualMachines_Delete", name=name)

    async def _withdrawn(self, name: str, code: str, message: str) -> AutoscalerError:
        """Remove what a failed launch has left; return the refusal once nothing is there. Raises TransientError."""
        refusal = failure(CREATE, code, message, of_launch=True)
        if isinstance(refusal, LaunchRefused):
            await self._calls.call("VirtualMachines_Delete", name=name)
            if await self._calls.find("VirtualMachines_Get", name=name) is not None:
                raise TransientError(f"{name}: {code}: {message}; what is left of it is being removed, asked again")
            self._begun.unmade(name)
        return refusal

    def _body(self, order: Order, name: str) -> dict[str, object]:
        """Everything of it follows from the order and the settings, so that a second try is the same request."""
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
            # -1: never above the on-demand price, and never taken for its price (Azure documentation, "Use Azure Spot
            # Virtual Machines", pricing). Delete: an evicted machine that is only stopped would cost its disk.
            ceiling = self._ceilings.of(order.offer.instance_type)
            most_usd = -1 if ceiling is None else float(usd_text(ceiling))
            properties |= {"priority": "Spot", "evictionPolicy": "Delete", "billingProfile": {"maxPrice": most_usd}}
        body: dict[str, object] = {"location": self._calls.region, "tags": tags_of(order), "properties": properties}
        zones = zones_of(order.offer.zone)
        return body | {"zones": zones} if zones else body


def _failure_of(told: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why a machine was never allocated; None for one that was, whatever else is wrong with it."""
    for status in told["properties"].get("instanceView", {}).get("statuses", ()):
        head, _, code = str(status.get("code", "")).rpartition("/")
        if head == "ProvisioningState/failed" and refusal_of(code, str(status.get("message", ""))) is not None:
            return code, str(status.get("message", ""))
    return None
