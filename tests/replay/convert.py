"""Converts histories recorded by 0.1 to the names of 0.2: `python -m tests.replay.convert`, once, in place.

Names come from the tables of docs/upgrading.md. Only names change: fact types and subjects, keys, reason tags and named
values; the order of facts, ids, times and figures stay. Files that are converted already are left alone.
"""

import json
import lzma
import sys
from pathlib import Path
from typing import Any

from tests.replay.histories_data import FOLDER

UPGRADING = Path(__file__).resolve().parents[2] / "docs" / "upgrading.md"
# Keys whose values are names of this project; elsewhere equal strings belong to users.
VALUE_KEYS = frozenset({"because", "basis", "cause", "fault", "channel", "step"})
Names = dict[str, dict[str, str]]


def names_of(page: str) -> Names:
    """Return old -> new by kind of name, from the rows `| kind | old | new | where |`."""
    names: Names = {}
    for line in page.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and not cells[0].startswith("-"):
            names.setdefault(cells[0], {})[cells[1]] = cells[2]
    return names


def converted(line: dict[str, Any], names: Names) -> dict[str, Any]:
    """Return one line of a history, the head or a fact, under the names of 0.2."""
    if "event" not in line:
        return line | {"policy": _policy(line["policy"], names["policy_field"], "")}
    event = line["event"] | {"data": _data(line["event"]["data"], names)}
    for old, new in names["fact_type"].items():
        if event["type"].rpartition(".")[0] == old:
            event["type"] = event["type"].replace(old, new)
            line = line | {"subject": line["subject"].replace(old, new)}
    return line | {"event": event}


def _data(value: Any, names: Names) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return [_data(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {names["fact_field"].get(key, key): _data(item, names) for key, item in value.items()}
    for key, item in renamed.items():
        if isinstance(item, str) and key in {"reason", "defer_reason"}:
            renamed[key] = names["reason_tag"].get(item, item)
        elif isinstance(item, str) and key in VALUE_KEYS:
            renamed[key] = names["fact_value"].get(item, item)
    return renamed


def _policy(value: Any, fields: dict[str, str], prefix: str) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return [_policy(item, fields, f"{prefix[:-1]}[].") for item in value]
    if not isinstance(value, dict):
        return value
    return {
        str(fields.get(f"{prefix}{key}", key)).rpartition(".")[2]: _policy(item, fields, f"{prefix}{key}.")
        for key, item in value.items()
    }


def main() -> None:
    """Convert every recorded history."""
    names = names_of(UPGRADING.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("*.jsonl.xz")):
        text = lzma.decompress(path.read_bytes()).decode()
        lines = [json.loads(line) for line in text.splitlines()]
        new = [converted(line, names) for line in lines]
        if new != lines:
            text = "".join(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in new)
            path.write_bytes(lzma.compress(text.encode(), preset=9))
        count = sum(old != line for old, line in zip(lines, new, strict=True))
        sys.stdout.write(f"{path.name}: {count} lines renamed\n")


if __name__ == "__main__":
    main()
