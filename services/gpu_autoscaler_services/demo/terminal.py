"""How the demo speaks on a terminal: one line as each thing happens, and the report as a table at the end."""

import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler_services.demo.report import Report

_MARKS = (
    ("NOTICE", "bold red"),
    ("the cloud refused", "yellow"),
    ("decided", "cyan"),
    ("node ", "green"),
    ("job ", "default"),
)


class Teller:
    """Says each line with the seconds since the beginning."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._console = Console(highlight=False, soft_wrap=True)

    def say(self, line: str) -> None:
        """Print the line; colours only on a terminal that wants them."""
        style = next((style for start, style in _MARKS if line.startswith(start)), "dim")
        text = Text(f"{time.monotonic() - self._began:6.1f} s  ", style="dim")
        text.append(line, style=style)
        self._console.print(text)
        sys.stdout.flush()


def show_report(report: Report, folder: Path) -> None:
    """Print the report; micro-dollars as dollars."""
    table = Table(title="What happened", box=None, title_justify="left", show_header=False)
    for field in msgspec.structs.fields(Report):
        value = getattr(report, field.name)
        if field.name == "broken_promises":
            continue
        if field.name.endswith("_micro_usd"):
            table.add_row(field.name.removesuffix("_micro_usd") + "_usd", f"{value / MICRO_USD_PER_USD:,.6f}")
        else:
            table.add_row(field.name, "-" if value is None else f"{value}")
    console = Console(highlight=False)
    console.print(table)
    for sentence in report.broken_promises:
        console.print(Text(f"BROKEN: {sentence}", style="bold red"))
    if not report.broken_promises:
        console.print(Text("All promises were kept.", style="bold green"))
    console.print(f"The report is also in {folder / 'report.json'}.")
