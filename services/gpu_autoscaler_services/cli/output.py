"""One way to show results: a table for people, JSON and YAML for programs, names for shells.

Data goes to stdout, words go to stderr. Colours only on a terminal, and never when NO_COLOR is set (no-color.org).
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from cyclopts import Parameter

Format = Literal["table", "json", "yaml", "name"]
Output = Annotated[Format, Parameter(name=["--output", "-o"], help="How to show it.")]
Row = Mapping[str, Any]
Columns = Sequence[tuple[str, Callable[[Row], object]]]

PIPE_WIDTH = 500  # columns of a table that nobody looks at: nothing is cut off


def show(document: Any, rows: Sequence[Row], columns: Columns, name: Callable[[Row], str], output: Format) -> None:  # noqa: ANN401 - whatever the gateway said
    """Write the result: the whole document as JSON or YAML, or its rows as names or as a table."""
    if output == "json":
        print(json.dumps(document, indent=2, ensure_ascii=False))
    elif output == "yaml":
        import yaml  # noqa: PLC0415 - only where it is asked for

        print(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), end="")
    elif output == "name":
        for row in rows:
            print(name(row))
    else:
        _table(rows, columns)


def _table(rows: Sequence[Row], columns: Columns) -> None:
    from rich.console import Console  # noqa: PLC0415 - takes a tenth of a second
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

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


def words(text: str) -> None:
    """Say something to the person, not to the program that reads our output."""
    print(text, file=sys.stderr)


def usd(micro_usd: int | None) -> str:
    """Micro-dollars as dollars; a dash for unknown."""
    return "-" if micro_usd is None else f"${micro_usd / 1_000_000:,.4f}"


def age(instant: str | None, now: str) -> str:
    """How long before `now`, the answer's `as_of`, an instant was: `3m`, `2h`. The cluster's clock may run faster."""
    if instant is None:
        return "-"
    seconds = int((datetime.fromisoformat(now) - datetime.fromisoformat(instant)).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{max(0, seconds)}s"
