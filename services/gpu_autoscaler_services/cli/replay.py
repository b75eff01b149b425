"""`replay`: a recorded history through today's code, or under another policy. Needs a file, or broker and store; never
the gateway."""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from cyclopts import Parameter

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler.tools.chart import draw
from gpu_autoscaler.tools.recording import Missing, Recording, collect, load, save
from gpu_autoscaler.tools.replay import Verdict
from gpu_autoscaler.tools.retrace import retrace
from gpu_autoscaler.tools.retraced import notes, told
from gpu_autoscaler.tools.whatif import WhatIf, notice_of, what_if
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.figures import figures
from gpu_autoscaler_services.cli.output import Columns, Output, show, print_message
from gpu_autoscaler_services.cli.record import HERE, Broker, with_bus
from gpu_autoscaler_services.simulation import ROLES
from gpu_autoscaler_services.wiring import command_store

_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


def replay(
    file: Path | None = None,
    /,
    *,
    from_: Annotated[
        str | None, Parameter(name="--from", help="From this instant on, RFC 3339, e.g. 2026-11-21T08:00:00Z.")
    ] = None,
    to: Annotated[str | None, Parameter(help="Up to this instant; default: now.")] = None,
    save_to: Annotated[
        Path | None, Parameter(name="--save", help="Keep what was read as a file; .xz is compressed.")
    ] = None,
    policy: Annotated[
        Path | None, Parameter(help="Another policy: say what would have been, in figures and as a picture.")
    ] = None,
    picture: Annotated[Path, Parameter(help="With --policy: where the picture goes.")] = Path("what-if.svg"),
    broker: Broker = HERE,
    output: Output = "table",
) -> int:
    """Ask today's code about each recorded plan, and list what it decides otherwise, with both reasons.

    The history is a file, or what the running system has of a time. Decisions that would come sooner are found between
    the recorded plans.

    With --policy the recorded world is played again in the simulator: once under the policy of the time, to show how
    far the model is off, and once under the other.

    Exits 0 equal (with --policy: told), 1 differs, 3 no plan of that time, 5 facts aged out.
    """
    other = None if policy is None else load_policy(policy)
    history = _history(file, from_, to, broker)
    if isinstance(history, Missing):
        print_message(f"gpu-autoscaler: {history.sentence}")
        return Verdict.FACTS_GONE if history.is_aged_out else Exit.NOT_FOUND
    if save_to is not None:
        save(history, save_to)
        print_message(f"kept in {save_to}")
    if not history.plans():
        print_message("gpu-autoscaler: no plan was made in the time asked for")
        return Exit.NOT_FOUND
    if other is not None:
        # What the services of the model log of its world is no word to the person who asked.
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        found = what_if(history, other, ROLES)
        draw(found, picture)
        _tell(found, picture, output)
        return Exit.OK
    retraced = retrace(history)
    for line in told(retraced):
        print(line)
    for note in notes(retraced):
        print_message(note)
    return Verdict.DIFFERS if retraced.found else Verdict.EQUAL


def _tell(found: WhatIf, picture: Path, output: Output) -> None:
    document = msgspec.to_builtins(found)
    rows = list(figures({"recorded": found.recorded, "modelled": found.modelled, "other": found.other}))
    show(document, rows, _COLUMNS, lambda row: str(row["name"]), output)
    print_message(notice_of(found))
    for head, sentences in (("from the record", found.taken_over), ("modelled", found.assumed)):
        print_message(f"{head}:")
        for sentence in sentences:
            print_message(f"  - {sentence}")
    print_message(f"picture: {picture}")


_COLUMNS: Columns = (
    ("", lambda row: row["name"]),
    ("RECORDED", lambda row: row["recorded"]),
    ("MODEL, POLICY OF THE TIME", lambda row: row["modelled"]),
    ("MODEL, OTHER POLICY", lambda row: row["other"]),
    ("DIFFERENCE", lambda row: row["difference"]),
)


def _history(file: Path | None, from_: str | None, to: str | None, broker: Broker) -> Recording | Missing:
    if (file is None) == (from_ is None and to is None):
        raise Stop("name a file, or say --from (and --to) to read the running system", Exit.USAGE)
    if file is not None:
        return load(file)
    clock = Clock.from_environment()
    from_at, to_at = _instant(from_, "--from", _BEGINNING), _instant(to, "--to", clock.now())
    settings = broker.settings()
    policy = load_policy(None if settings.policy.path is None else Path(settings.policy.path))

    async def read(bus: Bus) -> Recording | Missing:
        store = await command_store(settings)
        try:
            return await collect(bus, store, clock, policy, from_at=from_at, to_at=to_at)
        finally:
            if store is not None:
                await store.close()

    return with_bus(settings, read)


def _instant(text: str | None, option: str, default: datetime) -> datetime:
    if text is None:
        return default
    try:
        at = datetime.fromisoformat(text)
    except ValueError as exc:
        raise Stop(f"{option}: {text!r} is no instant; write 2026-11-21T08:00:00Z", Exit.USAGE) from exc
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
