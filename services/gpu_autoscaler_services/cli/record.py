"""Commands that read the streams themselves: `recompute` and `dead-letters`. They need the broker, not the gateway."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import structlog
from cyclopts import App, Parameter

from gpu_autoscaler.bus.dead_letters import DeadLetter, DeadLetters, Resubmitted
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import Settings, load_settings
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler.tools.replay import Recomputation, Verdict
from gpu_autoscaler.tools.replay import recompute as recompute_plan
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.output import Columns, Output, show, print_message
from gpu_autoscaler_services.wiring import command_bus, command_store

T = TypeVar("T")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Broker:
    """Where the record is."""

    nats: Annotated[
        str | None, Parameter(help="Address of NATS. Default: GPU_AUTOSCALER_NATS_URL, else the settings' default.")
    ] = None
    config: Annotated[Path | None, Parameter(env_var="GPU_AUTOSCALER_CONFIG", help="Settings file (TOML).")] = None

    def settings(self) -> Settings:
        """The settings of file and environment, with --nats above both. Raises ConfigError."""
        settings = load_settings(self.config, os.environ)
        if self.nats is None:
            return settings
        return msgspec.structs.replace(settings, nats=msgspec.structs.replace(settings.nats, url=self.nats))


HERE = Broker()


def with_bus(settings: Settings, use: Callable[[Bus], Awaitable[T]]) -> T:
    """Return what comes of `use` with a connection to the broker that lasts as long."""
    # What goes wrong is said once, at the end; what the client tries meanwhile is of no use to the caller.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))

    async def go() -> T:
        bus = await command_bus(settings, "cli")
        try:
            return await use(bus)
        finally:
            await bus.close()

    return asyncio.run(go())


def recompute(
    plan_id: str,
    /,
    *,
    policy: Annotated[Path | None, Parameter(help="Policy file; default: the one of the settings.")] = None,
    broker: Broker = HERE,
) -> int:
    """Make a recorded plan again from its facts and compare it byte for byte.

    Where its first facts have aged out, a snapshot in the store (store.url) stands for them, if the store is here.

    Exits 0 equal, 1 differs, 3 no such plan, 5 facts aged out, 6 made by another core, 7 made with another policy.
    """
    settings = broker.settings()
    path = policy or (None if settings.policy.path is None else Path(settings.policy.path))
    known = load_policy(path)
    clock = Clock.from_environment()

    async def make_again(bus: Bus) -> Recomputation:
        store = await command_store(settings)
        try:
            return await recompute_plan(bus, plan_id, known, clock, store)
        finally:
            if store is not None:
                await store.close()

    found = with_bus(settings, make_again)
    for line in found.difference:
        print(line)
    if found.verdict is Verdict.EQUAL:
        print(f"{plan_id}: {found.sentence}")
    else:
        print_message(f"gpu-autoscaler: {plan_id}: {found.sentence}")
    return found.verdict


dead_letters = App(name="dead-letters", help="Messages that were set aside, and why.")

_COLUMNS: Columns = (
    ("LETTER", lambda row: row["sequence"]),
    ("AT", lambda row: row["at"]),
    ("SERVICE", lambda row: row["service"]),
    ("SUBJECT", lambda row: row["subject"]),
    ("PLACE", lambda row: f"{row['stream']}:{row['stream_sequence']}"),
    ("SENT AGAIN", lambda row: row["resubmitted_count"] or ""),
    ("REASON", lambda row: row["reason"]),
)


@dead_letters.command(name="list")
def list_(
    *,
    after: Annotated[int, Parameter(help="Only letters after this one.")] = 0,
    limit: Annotated[int, Parameter(help="How many, oldest first.")] = 100,
    broker: Broker = HERE,
    output: Output = "table",
) -> None:
    """List messages that were set aside, oldest first."""
    page = with_bus(broker.settings(), lambda bus: DeadLetters(bus).page(after_sequence=after, count_max=limit))
    rows = [_row(letter) for letter in page]
    show(rows, rows, _COLUMNS, lambda row: str(row["sequence"]), output)


def _row(letter: DeadLetter) -> dict[str, object]:
    row: dict[str, object] = msgspec.to_builtins(msgspec.structs.replace(letter, payload=b""))
    return {**row, "payload": letter.payload.decode(errors="backslashreplace")}


@dead_letters.command
def resubmit(
    letter: Annotated[int | None, Parameter(help="Number of the letter; see list.")] = None,
    /,
    *,
    all_: Annotated[
        bool, Parameter(name="--all", negative=(), help="Every letter that was not sent again yet.")
    ] = False,
    service: Annotated[str | None, Parameter(help="With --all: only those that this service set aside.")] = None,
    broker: Broker = HERE,
) -> None:
    """Send messages again on their own subjects, after what was wrong is mended."""
    if (letter is None) != all_:
        raise Stop("name one letter, or say --all", Exit.USAGE)
    at = Clock.from_environment().now()

    async def send(bus: Bus) -> list[Resubmitted]:
        letters = DeadLetters(bus)
        if letter is not None:
            return [await letters.resubmit(letter, at=at)]
        return list(await letters.resubmit_all(at=at, service=service))

    for sent in with_bus(broker.settings(), send):
        print(f"{sent.letter.sequence} {sent.letter.subject} {sent.ack.stream}:{sent.ack.sequence}")
