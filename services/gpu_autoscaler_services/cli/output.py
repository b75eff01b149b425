"""Show results: a table for people, JSON and YAML for programs, names for shells.

Data goes to stdout, messages to stderr. Colors only on a terminal, and never when NO_COLOR is set (no-color.org).
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from cyclopts import Parameter

Format = Literal["table", "json", "yaml", "name"]
Output = Annotated[Format, Parameter(name=["--output", "-o"], help="Output format.")]
Row = Mapping[str, Any]
Columns = Sequence[tuple[str, Callable[[Row], object]]]

PIPE_WIDTH = 500  # columns of a table that is not on a terminal: nothing is truncated


def show(document: Any, rows: Sequence[Row], columns: Columns, name: Callable[[Row], str], output: Format) -> None:  # noqa: ANN401 - any answer of the gateway
    """Write the result: the whole document as JSON or YAML, or its rows as names or as a table."""
    if output == "json":
        print(json.dumps(document, indent=2, ensure_ascii=False))
    elif output == "yaml":
        import yaml  # noqa: PLC0415 - only for YAML output

        print(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), end="")
    elif output == "name":
        for row in rows:
            print(name(row))
    else:
        _table(rows, columns)


def _table(rows: Sequence[Row], columns: Columns) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow import, 0.1 s
    from rich.table import Table  # noqa: PLC0415 - slow import
    from rich.text import Text  # noqa: PLC0415 - slow import

    table = Table(box=None, pad_edge=False, header_style="dim", show_header=any(header for header, _ in columns))
    for header, _ in columns:
        table.add_column(header)
    for row in rows:
        table.add_row(*(Text(_cell(value(row))) for _, value in columns))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


def _cell(value: object) -> str:
    if value is None or value in ("", [], ()):
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def print_message(text: str) -> None:
    """Print to stderr: for the person, not for the program that reads stdout."""
    print(text, file=sys.stderr)


def usd(micro_usd: int | None) -> str:
    """Return micro-dollars as dollars; a dash for unknown."""
    return "-" if micro_usd is None else f"${micro_usd / 1_000_000:,.4f}"


def age(instant: str | None, now: str) -> str:
    """Return how long before `now` (the answer's `as_of`, cluster time) an instant was: `3m`, `2h`."""
    if instant is None:
        return "-"
    seconds = int((datetime.fromisoformat(now) - datetime.fromisoformat(instant)).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{max(0, seconds)}s"
