"""Show results on stdout: a table for people, JSON and YAML for programs, names for shells. Messages go to stderr."""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from cyclopts import Parameter

Output = Annotated[
    Literal["table", "wide", "json", "yaml", "name"],
    Parameter(name=["--output", "-o"], help="Output format; wide: a table with all columns."),
]
Row = Mapping[str, Any]
Columns = Sequence[tuple[str, Callable[[Row], object]]]

_INSTANT = re.compile(r"(\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|\+00:00)")  # tables show seconds
LAST_COLUMN_WIDTH_MIN = 24  # a narrower last column is not wrapped: its lines run on, as those of kubectl


def is_table(output: Output) -> bool:
    """Return True for output that a person reads."""
    return output in {"table", "wide"}


def show(
    document: Any,  # noqa: ANN401 - any answer of the gateway
    rows: Sequence[Row],
    columns: Columns,
    name: Callable[[Row], str],
    output: Output,
    *,
    wide: Sequence[str] = (),
    none: str = "no resources found",
) -> None:
    """Write the result: the whole document as JSON or YAML, or its rows as names or as a table.

    `wide`: headers of columns that only `-o wide` shows. `none`: the message on stderr for a table without rows.
    """
    if output == "json":
        print(json.dumps(document, indent=2, ensure_ascii=False))
    elif output == "yaml":
        import yaml  # noqa: PLC0415 - only for YAML output

        print(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), end="")
    elif output == "name":
        for row in rows:
            print(name(row))
    elif rows:
        _print_table(rows, [column for column in columns if output == "wide" or column[0] not in wide])
    else:
        print_message(none)


def _print_table(rows: Sequence[Row], columns: Columns) -> None:
    """Print aligned columns. On a terminal, the last one is wrapped into the rest of the line; nothing is truncated."""
    headers = [header for header, _ in columns]
    lines = [headers] if any(headers) else []
    lines += [[_cell(value(row)) for _, value in columns] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)][:-1]
    indent = sum(widths) + 2 * len(widths)
    rest = shutil.get_terminal_size().columns - indent if sys.stdout.isatty() else 0
    for *cells, last in lines:
        parts = textwrap.wrap(last, rest) if rest >= LAST_COLUMN_WIDTH_MIN else [last]
        head = "".join(f"{cell:{width + 2}}" for cell, width in zip(cells, widths, strict=True))
        print(head + f"\n{'':{indent}}".join(parts))


def _cell(value: object) -> str:
    if value is None or value in ("", [], ()):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return _INSTANT.sub(r"\1Z", text).replace("\n", " ")


def print_message(text: str) -> None:
    """Print to stderr: for the person, not for the program that reads stdout."""
    print(text, file=sys.stderr)


def usd(micro_usd: int | None) -> str:
    """Return micro-dollars as dollars, with four digits below a dollar; a dash for unknown."""
    if micro_usd is None:
        return "-"
    return f"${micro_usd / 1_000_000:,.{4 if 0 < abs(micro_usd) < 1_000_000 else 2}f}"


def age(instant: str | None, now: str) -> str:
    """Return how long before `now` (the answer's `as_of`, cluster time) an instant was: `3m`, `2h`."""
    if instant is None:
        return "-"
    seconds = int((datetime.fromisoformat(now) - datetime.fromisoformat(instant)).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{max(0, seconds)}s"
