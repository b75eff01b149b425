"""`gpu-autoscaler demo`: run a complete scenario on a simulated cluster and narrate it."""

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.output import print_message
from gpu_autoscaler_services.local.system import CloudName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_autoscaler_services.demo.report import Report
    from gpu_autoscaler_services.demo.teams import TeamFigures

_MARKS = (
    ("NOTICE", "bold red"),
    ("the cloud refused", "yellow"),
    ("decided", "cyan"),
    ("node ", "green"),
    ("research: ", "bold"),
    ("product: ", "bold"),
    ("job ", "default"),
)


def demo(
    *,
    trace: Annotated[str | None, Parameter(help="Replay recorded pods instead of the scenario: openb:FOLDER.")] = None,
    pods: Annotated[int, Parameter(help="Number of pods, from the end of the trace.")] = 100,
    speed: Annotated[float, Parameter(help="Speed-up of the trace's arrivals and run times.")] = 600.0,
    clock_factor: Annotated[float, Parameter(help="Speed-up of cluster time, 1 to 20.")] = 15.0,
    gateway_port: Annotated[int, Parameter(help="Port of dashboard and API; 0 picks a free one.")] = 8000,
    folder: Annotated[Path, Parameter(help="Folder of logs, stores and report; emptied first.")] = Path("out/demo"),
    cloud: Annotated[CloudName, Parameter(help="Cloud API to buy nodes from; all except sim are fakes.")] = "sim",
    keep: Annotated[bool, Parameter(negative="--no-keep", help="Keep running after the report, until Ctrl-C.")] = False,
) -> int:
    """Run the demo."""
    from gpu_autoscaler_services.demo.run import DemoOptions, run_demo  # noqa: PLC0415 - imports the whole system

    options = DemoOptions(
        folder=folder,
        gateway_port=gateway_port,
        clock_factor=clock_factor,
        trace=trace,
        pods=pods,
        speed=speed,
        is_kept_up=keep,
        cloud=cloud,
    )
    printer = _LinePrinter()
    report = asyncio.run(run_demo(options, printer.print, on_report=lambda report: _show_report(report, folder)))
    if report.broken_promises:
        print_message(f"{len(report.broken_promises)} promise(s) broken; see the logs in {folder / 'logs'}")
        return Exit.FAILURE
    return Exit.OK


class _LinePrinter:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._console = Console(highlight=False, soft_wrap=True)

    def print(self, line: str) -> None:
        style = next((style for start, style in _MARKS if line.startswith(start)), "dim")
        text = Text(f"{time.monotonic() - self._began:6.1f} s  ", style="dim")
        text.append(line, style=style)
        self._console.print(text)
        sys.stdout.flush()


def _show_report(report: "Report", folder: Path) -> None:
    """Print the report; micro-dollars as dollars."""
    table = Table(title="Report", box=None, title_justify="left", show_header=False)
    for field in msgspec.structs.fields(type(report)):
        value = getattr(report, field.name)
        if field.name in ("broken_promises", "teams"):
            continue
        if field.name.endswith("_micro_usd"):
            table.add_row(field.name.removesuffix("_micro_usd") + "_usd", f"{value / MICRO_USD_PER_USD:,.6f}")
        else:
            table.add_row(field.name, "-" if value is None else f"{value}")
    console = Console(highlight=False)
    console.print(table)
    if report.teams:
        console.print(_teams_table(report.teams))
    for sentence in report.broken_promises:
        console.print(Text(f"BROKEN: {sentence}", style="bold red"))
    if not report.broken_promises:
        console.print(Text("All promises kept.", style="bold green"))
    console.print(f"Report file: {folder / 'report.json'}")


def _teams_table(teams: "Sequence[TeamFigures]") -> Table:
    """Return a row per figure and a column per team; micro-dollars as dollars."""
    table = Table(title="Teams", box=None, title_justify="left", show_header=False)
    for field in msgspec.structs.fields(type(teams[0])):
        values = [getattr(team, field.name) for team in teams]
        name = field.name
        if name.endswith("_micro_usd"):
            name = name.removesuffix("_micro_usd") + "_usd"
            values = [f"{value / MICRO_USD_PER_USD:,.6f}" for value in values]
        table.add_row(name, *(_cell(value) for value in values))
    return table


def _cell(value: object) -> str:
    if value is None or value == ():
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value}"
