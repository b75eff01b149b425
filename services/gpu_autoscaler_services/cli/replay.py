"""`gpu-autoscaler replay`: a recorded history with the current code, or under another policy.

Needs a file, or broker and store, but never the gateway.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from gpu_autoscaler.replay.chart import draw
from gpu_autoscaler.replay.counterfactual import PolicyComparison, compare_policies, divergence_sentence
from gpu_autoscaler.replay.recompute import Verdict
from gpu_autoscaler.replay.recording import Missing, Recording, collect, load, save
from gpu_autoscaler.replay.retrace import notes, report_lines, retrace
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.figures import figures
from gpu_autoscaler_services.cli.output import Columns, Output, print_message, show
from gpu_autoscaler_services.cli.record import HERE, Broker, with_bus_and_store
from gpu_autoscaler_services.cli.running import silence_logs
from gpu_autoscaler_services.simulation import ROLES

_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


def replay(
    file: Annotated[
        Path | None, Parameter(help="Recorded history. Default: read the running system, see --from and --to.")
    ] = None,
    /,
    *,
    from_: Annotated[str | None, Parameter(name="--from", help="Start, RFC 3339, e.g. 2026-11-21T08:00:00Z.")] = None,
    to: Annotated[str | None, Parameter(help="End, RFC 3339. Default: now.")] = None,
    save_to: Annotated[
        Path | None, Parameter(name="--save", help="Save the history to a file; .xz is compressed.")
    ] = None,
    policy: Annotated[
        Path | None, Parameter(help="Policy file to compare with: figures and a chart of the outcome under it.")
    ] = None,
    chart: Annotated[Path, Parameter(help="With --policy: path of the SVG chart.")] = Path("what-if.svg"),
    broker: Broker = HERE,
    output: Output = "table",
) -> int:
    """Plan a recorded history again and list the differences, or compare policies."""
    other = None if policy is None else load_policy(policy)
    history = _history(file, from_, to, broker)
    if isinstance(history, Missing):
        print_message(f"gpu-autoscaler: {history.sentence}")
        return Verdict.FACTS_EXPIRED if history.is_expired else Exit.NOT_FOUND
    if save_to is not None:
        save(history, save_to)
        print_message(f"history saved to {save_to}")
    if not history.plans():
        print_message("gpu-autoscaler: no plan was made between --from and --to; widen the interval")
        return Exit.NOT_FOUND
    if other is not None:
        silence_logs()
        comparison = compare_policies(history, other, ROLES)
        draw(comparison, chart)
        _print_comparison(comparison, chart, output)
        return Exit.OK
    result = retrace(history)
    for line in report_lines(result):
        print(line)
    for note in notes(result):
        print_message(note)
    return Verdict.DIFFERS if result.deviations else Verdict.EQUAL


def _print_comparison(comparison: PolicyComparison, chart: Path, output: Output) -> None:
    document = msgspec.to_builtins(comparison)
    outcomes = {"recorded": comparison.recorded, "modeled": comparison.modeled, "other": comparison.other}
    rows = list(figures(outcomes))
    show(document, rows, _COLUMNS, lambda row: str(row["name"]), output)
    print_message(divergence_sentence(comparison))
    for heading, sentences in (
        ("taken from the recording", comparison.from_recording),
        ("modeled", comparison.assumptions),
    ):
        print_message(f"{heading}:")
        for sentence in sentences:
            print_message(f"  - {sentence}")
    print_message(f"chart: {chart}")


_COLUMNS: Columns = (
    ("", lambda row: row["name"]),
    ("RECORDED", lambda row: row["recorded"]),
    ("MODELED, RECORDED POLICY", lambda row: row["modeled"]),
    ("MODELED, OTHER POLICY", lambda row: row["other"]),
    ("DIFFERENCE", lambda row: row["difference"]),
)


def _history(file: Path | None, from_: str | None, to: str | None, broker: Broker) -> Recording | Missing:
    if (file is None) == (from_ is None and to is None):
        raise Stop("give a file, or --from (and --to) to read the running system", Exit.USAGE)
    if file is not None:
        return load(file)
    clock = Clock.from_environment()
    from_at, to_at = _instant(from_, "--from", _BEGINNING), _instant(to, "--to", clock.now())
    settings = broker.settings()
    policy = load_policy(None if settings.policy.path is None else Path(settings.policy.path))
    return with_bus_and_store(
        settings, lambda bus, store: collect(bus, store, clock, policy, from_at=from_at, to_at=to_at)
    )


def _instant(text: str | None, option: str, default: datetime) -> datetime:
    if text is None:
        return default
    try:
        at = datetime.fromisoformat(text)
    except ValueError as exc:
        raise Stop(f"{option} {text!r} is not an instant; example: 2026-11-21T08:00:00Z", Exit.USAGE) from exc
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
