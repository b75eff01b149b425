"""The default policy as a TOML file that explains itself: every field with what it means, and where it comes from.

Called by `make schemas` for `deploy/policies/default.toml`.
"""

import json
import sys
from collections.abc import Iterator

import msgspec

from gpu_autoscaler.core.policy import DEFAULT_POLICY

_HEAD = """\
# Every threshold of every decision, with its default. Written by `make schemas`: copy what you change into a file of
# your own; what that one does not name stays as it is here. Names with a # in front are not set.
"""


def default_policy_file() -> str:
    """DEFAULT_POLICY as TOML; loading it gives an equal policy."""
    return _HEAD + "\n".join(_lines(DEFAULT_POLICY)) + "\n"


def _lines(table: msgspec.Struct) -> Iterator[str]:
    kind = type(table)
    described = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    tables: list[tuple[str, msgspec.Struct]] = []
    for field in msgspec.structs.fields(kind):
        value, description = getattr(table, field.name), described[field.name]["description"]
        if isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
            tables += [(f"# {description}\n[[{field.name}]]", item) for item in value]
        elif value is None:
            yield f"\n# {description}\n# {field.name} ="
        else:
            # TOML writes numbers, strings, lists of them and an empty table as JSON does.
            yield f"\n# {description}\n{field.name} = {json.dumps(msgspec.to_builtins(value), ensure_ascii=False)}"
    for head, item in tables:
        yield f"\n{head}"
        yield from _lines(item)


if __name__ == "__main__":
    sys.stdout.write(default_policy_file())
