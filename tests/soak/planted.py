"""Known bugs that the soak must find: each breaks a service in its own process (`serve.py`)."""

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import msgspec

from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.store.postgres import PostgresStore
from gpu_autoscaler.store.protocol import LastCharge


def no_resync() -> None:
    """Let streams discard facts about living objects, as before docs/designs/005-resync.md."""

    async def never(*_: Any) -> None:  # noqa: ANN401 - the arguments of what it replaces
        await asyncio.Event().wait()

    mock.patch.object(Runner, "_resync", never).start()


def restart_loses_charges() -> None:
    """Take the time between the last span in the ledger and the restart for charged."""
    last_charges = PostgresStore.last_charges

    async def up_to_now(self: PostgresStore, *arguments: Any) -> Mapping[Any, LastCharge]:  # noqa: ANN401 - as above
        now = datetime.now(UTC)
        return {
            provider_id: _skip(charge, now) for provider_id, charge in (await last_charges(self, *arguments)).items()
        }

    mock.patch.object(PostgresStore, "last_charges", up_to_now).start()


def _skip(charge: LastCharge, now: datetime) -> LastCharge:
    skipped = cost_micro_usd(charge.last.price_micro_usd_per_hour, now - charge.last.to_at)
    last = msgspec.structs.replace(charge.last, to_at=now)
    return msgspec.structs.replace(charge, last=last, total_micro_usd=charge.total_micro_usd + skipped)


PLANTED: Mapping[str, Callable[[], None]] = {"no_resync": no_resync, "restart_loses_charges": restart_loses_charges}
