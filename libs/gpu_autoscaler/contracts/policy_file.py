"""The default policy as a TOML file that explains itself: every field with what it means, and where it comes from.

Called by `make schemas` for `deploy/policies/default.toml`.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY

_HEAD = """\
# Every threshold of every decision, with its default. Written by `make schemas`: copy what you change into a file of
# your own; what that one does not name stays as it is here. Names with a # in front are not set.
"""


def default_policy_file() -> str:
    """DEFAULT_POLICY as TOML; loading it gives an equal policy."""
    return _HEAD + "\n".join(_lines(DEFAULT_POLICY)) + "\n"


def _lines(table: msgspec.Struct, at: str = "") -> Iterator[str]:
    """The fields of one table; the tables below it come after them, as TOML wants it."""
    kind = type(table)
    described = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    tables: list[tuple[str, str, msgspec.Struct]] = []
    for field in msgspec.structs.fields(kind):
        value, path = getattr(table, field.name), f"{at}{field.name}"
        comment = _comment(described[field.name])
        if isinstance(value, msgspec.Struct):
            tables.append((f"{comment}\n[{path}]", path, value))
        elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
            tables += [(f"{comment}\n[[{path}]]", path, item) for item in value]
        elif value is None:
            yield f"\n{comment}\n# {field.name} ="
        else:
            # TOML writes numbers, strings, lists of them and an empty table as JSON does.
            yield f"\n{comment}\n{field.name} = {json.dumps(msgspec.to_builtins(value), ensure_ascii=False)}"
    for head, path, item in tables:
        yield f"\n{head}"
        yield from _lines(item, f"{path}.")


def _comment(field: dict[str, Any]) -> str:
    """What the field means, its source, and what may stand there."""
    said = range_of(field)
    return f"# {field['description']}" + (f" Range: {said}." if said else "")


def range_of(field: dict[str, Any]) -> str:
    """Return in words what the JSON Schema of a number or a choice allows; empty: anything of its type."""
    for variant in field.get("anyOf", [field]):
        if "enum" in variant:
            return ", ".join(map(str, variant["enum"]))
        least, above, most = (variant.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
        low = f"above {above}" if above is not None else None if least is None else f"{least}"
        if low is not None and most is not None:
            return f"{low} to {most}"
        if most is not None:
            return f"up to {most}"
        if low is not None:
            return low if above is not None else f"{low} or more"
    return ""


if __name__ == "__main__":
    sys.stdout.write(default_policy_file())
