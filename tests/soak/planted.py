"""Known bugs that the soak must find: each breaks a service in its own process (`serve.py`)."""

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import msgspec

from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.store.postgres import PostgresStore
from gpu_autoscaler.store.protocol import LastCharge


def no_resync() -> None:
    """Let streams discard facts about living objects, as before docs/adr/0005-resync.md."""

    async def never(*_: Any) -> None:  # noqa: ANN401 - the arguments of what it replaces
        await asyncio.Event().wait()

    mock.patch.object(Runner, "_resync", never).start()


def restart_loses_charges() -> None:
    """Charge from the restart on instead of from the end of the last span in the ledger."""
    last_charges = PostgresStore.last_charges

    async def from_now(self: PostgresStore, *arguments: Any) -> Mapping[Any, LastCharge]:  # noqa: ANN401 - as above
        now = datetime.now(UTC)
        return {
            provider_id: msgspec.structs.replace(charge, last=msgspec.structs.replace(charge.last, to_at=now))
            for provider_id, charge in (await last_charges(self, *arguments)).items()
        }

    mock.patch.object(PostgresStore, "last_charges", from_now).start()


PLANTED: Mapping[str, Callable[[], None]] = {"no_resync": no_resync, "restart_loses_charges": restart_loses_charges}
