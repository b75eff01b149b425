"""Commands that read the streams directly: `recompute` and `dead-letters`. They need NATS, not the gateway."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from cyclopts import Parameter

from gpu_autoscaler.bus.dead_letters import DeadLetter, DeadLetters, Resubmitted
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.replay.recompute import Verdict
from gpu_autoscaler.replay.recompute import recompute as recompute_plan
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import Settings, load_settings
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.options import CommandGroup
from gpu_autoscaler_services.cli.output import Columns, Output, print_message, show
from gpu_autoscaler_services.cli.running import silence_logs
from gpu_autoscaler_services.wiring import command_bus, command_store

T = TypeVar("T")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Broker:
    """Address of the broker."""

    nats: Annotated[
        str | None, Parameter(help="Address of NATS. Default: GPU_AUTOSCALER_NATS_URL, else the setting nats.url.")
    ] = None
    config: Annotated[Path | None, Parameter(env_var="GPU_AUTOSCALER_CONFIG", help="Settings file (TOML).")] = None

    def settings(self) -> Settings:
        """Return the settings of file and environment, overridden by --nats. Raises ConfigError."""
        settings = load_settings(self.config, os.environ)
        if self.nats is None:
            return settings
        return msgspec.structs.replace(settings, nats=msgspec.structs.replace(settings.nats, url=self.nats))


HERE = Broker()


def with_bus(settings: Settings, use: Callable[[Bus], Awaitable[T]]) -> T:
    """Return the result of `use`, called with a connection to the broker that is closed afterwards."""
    silence_logs()

    async def connect_and_use() -> T:
        bus = await command_bus(settings, "cli")
        try:
            return await use(bus)
        finally:
            await bus.close()

    return asyncio.run(connect_and_use())


def with_bus_and_store(settings: Settings, use: Callable[[Bus, Store | None], Awaitable[T]]) -> T:
    """Return the result of `use` like `with_bus`; the store is None if its file does not exist."""

    async def open_and_use(bus: Bus) -> T:
        store = await command_store(settings)
        try:
            return await use(bus, store)
        finally:
            if store is not None:
                await store.close()

    return with_bus(settings, open_and_use)


def recompute(
    plan_id: Annotated[str, Parameter(help="Id of the plan; see `plans`.")],
    /,
    *,
    policy: Annotated[Path | None, Parameter(help="Policy file. Default: the setting policy.path.")] = None,
    broker: Broker = HERE,
) -> int:
    """Recompute a recorded plan from its facts and compare."""
    settings = broker.settings()
    path = policy or (None if settings.policy.path is None else Path(settings.policy.path))
    known = load_policy(path)
    clock = Clock.from_environment()
    result = with_bus_and_store(settings, lambda bus, store: recompute_plan(bus, plan_id, known, clock, store))
    for line in result.difference:
        print(line)
    if result.verdict is Verdict.EQUAL:
        print(f"{plan_id}: {result.sentence}")
    else:
        print_message(f"gpu-autoscaler: {plan_id}: {result.sentence}")
    return result.verdict


_GROUP = CommandGroup(
    "dead-letters", "dead-letters list", "dead-letters resubmit 17", "dead-letters resubmit --all --service scheduler"
)
dead_letters = _GROUP.app

_COLUMNS: Columns = (
    ("LETTER", lambda row: row["sequence"]),
    ("AT", lambda row: row["at"]),
    ("SERVICE", lambda row: row["service"]),
    ("SUBJECT", lambda row: row["subject"]),
    ("POSITION", lambda row: f"{row['stream']}:{row['stream_sequence']}"),
    ("RESUBMITTED", lambda row: row["resubmitted_count"] or ""),
    ("REASON", lambda row: row["reason"]),
)


@_GROUP.command
def list_(
    *,
    after: Annotated[int, Parameter(help="Only letters with a larger number.")] = 0,
    limit: Annotated[int, Parameter(help="Number of letters, oldest first.")] = 100,
    broker: Broker = HERE,
    output: Output = "table",
) -> None:
    """List dead letters, oldest first."""
    page = with_bus(broker.settings(), lambda bus: DeadLetters(bus).page(after_sequence=after, count_max=limit))
    rows = [_row(letter) for letter in page]
    show(rows, rows, _COLUMNS, lambda row: str(row["sequence"]), output)


def _row(letter: DeadLetter) -> dict[str, object]:
    row: dict[str, object] = msgspec.to_builtins(msgspec.structs.replace(letter, payload=b""))
    return {**row, "payload": letter.payload.decode(errors="backslashreplace")}


@_GROUP.command
def resubmit(
    letter: Annotated[int | None, Parameter(help="Number of the letter; see `dead-letters list`.")] = None,
    /,
    *,
    all_: Annotated[bool, Parameter(name="--all", help="All letters that were not resubmitted yet.")] = False,
    service: Annotated[str | None, Parameter(help="With --all: only letters of this service.")] = None,
    broker: Broker = HERE,
) -> None:
    """Publish dead letters again on their original subjects, after the cause is fixed."""
    if (letter is None) != all_:
        raise Stop("give the number of one letter, or --all; see: gpu-autoscaler dead-letters list", Exit.USAGE)
    at = Clock.from_environment().now()

    async def send(bus: Bus) -> list[Resubmitted]:
        letters = DeadLetters(bus)
        if letter is not None:
            return [await letters.resubmit(letter, at=at)]
        return list(await letters.resubmit_all(at=at, service=service))

    for sent in with_bus(broker.settings(), send):
        print(f"{sent.letter.sequence} {sent.letter.subject} {sent.ack.stream}:{sent.ack.sequence}")
