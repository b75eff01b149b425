"""The simulated cloud's own invoice. Tests and the demo's report read it, services do not.

Independent of facts and ledgers: each instance costs its price from launch to termination, rounded once.
"""

from collections.abc import Iterable
from datetime import datetime

import msgspec

from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.simcluster.instances import Machine


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One instance on the bill."""

    provider_id: ProviderId
    action_id: ActionId | None
    installation: str | None
    instance_type: str
    zone: str
    capacity_type: str
    gpu_count: int
    price_micro_usd_per_hour: int
    launched_at: Instant
    terminated_at: Instant | None  # None: still running, charged up to `as_of`
    cost_micro_usd: int


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    """All instances ever launched, in order of launch."""

    as_of: Instant
    total_micro_usd: int
    lines: tuple[InvoiceLine, ...]


def invoice(machines: Iterable[Machine], as_of: datetime) -> Invoice:
    """Return the invoice up to `as_of`, a function of machines and instant."""
    lines = tuple(_line(machine, as_of) for machine in machines)
    return Invoice(as_of=as_of, total_micro_usd=sum(line.cost_micro_usd for line in lines), lines=lines)


def _line(machine: Machine, as_of: datetime) -> InvoiceLine:
    price = machine.offer.price_micro_usd_per_hour
    if price is None:
        raise ValueError(f"{machine.offer.key} was launched without a price and cannot be charged")
    return InvoiceLine(
        provider_id=machine.provider_id,
        action_id=machine.action_id,
        installation=machine.installation,
        instance_type=machine.offer.instance_type,
        zone=machine.offer.zone,
        capacity_type=machine.offer.capacity_type,
        gpu_count=machine.kind.gpu_count,
        price_micro_usd_per_hour=price,
        launched_at=machine.launched_at,
        terminated_at=machine.terminated_at,
        cost_micro_usd=cost_micro_usd(price, (machine.terminated_at or as_of) - machine.launched_at),
    )
