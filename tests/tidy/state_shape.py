"""The shape of the folded state, as snapshots keep it: each field, nested part and choice of values, one a line.

`python -m tests.tidy.state_shape` records it after a field was added. It refuses a change that makes earlier snapshots
unreadable: then give the field a default or another name, or increment `snapshot_codec.FORMAT_VERSION`, after which the
first start of the new version reads the whole streams.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import inspect

from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.runtime.snapshot_codec import FORMAT_VERSION

RECORDED = Path(__file__).with_name("state_shape.txt")
REQUIRED = "required"
Shape = Mapping[str, frozenset[str]]  # choices by path


def shape(root: type = ClusterState) -> Shape:
    """Return what each part of an encoded value of this type may be."""
    known: set[Any] = set()
    ahead = [root]
    lines: dict[str, frozenset[str]] = {}
    while ahead:
        struct = ahead.pop()
        if struct in known:
            continue
        known.add(struct)
        assert _name(struct) not in lines, f"two structs of the state are named {_name(struct)}"
        info = inspect.type_info(struct)
        assert isinstance(info, inspect.StructType)
        lines[_name(struct)] = frozenset({"array" if info.array_like else "object", f"tag {info.tag}"})
        for field in info.fields:
            path = f"{_name(struct)}.{field.encode_name}"
            for place, choices, structs in _parts(path, field.type):
                lines[place] = choices | ({REQUIRED} if field.required and place == path else frozenset())
                ahead += structs
    return lines


def _parts(path: str, kind: inspect.Type) -> Iterator[tuple[str, frozenset[str], list[type]]]:
    """Yield each nested part with its choices, and the structs among them."""
    choices: set[str] = set()
    structs: list[type] = []
    for choice in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        match choice:
            case inspect.StructType():
                choices.add(_name(choice.cls))
                structs.append(choice.cls)
            case inspect.LiteralType():
                choices.update(repr(value) for value in choice.values)
            case inspect.EnumType():
                choices.update(repr(member.value) for member in choice.cls)
            case inspect.DictType():
                choices.add("object")
                yield from _parts(f"{path}<key>", choice.key_type)
                yield from _parts(f"{path}<value>", choice.value_type)
            case inspect.TupleType():
                choices.add(f"{len(choice.item_types)} items")
                for number, item in enumerate(choice.item_types):
                    yield from _parts(f"{path}<{number}>", item)
            case inspect.CollectionType():
                choices.add("array")
                yield from _parts(f"{path}<item>", choice.item_type)
            case _:
                choices.add(type(choice).__name__.removesuffix("Type").lower())
    yield path, frozenset(choices), structs


def _name(struct: type) -> str:
    return struct.__qualname__.rpartition(".")[2]


def violations(recorded: Shape, current: Shape) -> list[str]:
    """Return why what was encoded in the recorded shape cannot be decoded in the current one; empty: it can."""
    broken = []
    for path, choices in recorded.items():
        if path not in current:
            broken.append(f"{path} is gone: its content would be lost")
        elif lost := choices - current[path] - {REQUIRED}:
            broken.append(f"{path} can no longer be {', '.join(sorted(lost))}")
    for path, choices in current.items():
        is_new = REQUIRED in choices and REQUIRED not in recorded.get(path, frozenset())
        if is_new and path.rpartition(".")[0] in recorded:
            broken.append(f"{path} has no default")
    return broken


def to_text(current: Shape, version: int = FORMAT_VERSION) -> str:
    """Return the shape as the file keeps it."""
    lines = [f"{path}: {' | '.join(sorted(choices))}" for path, choices in sorted(current.items())]
    return "\n".join((f"version {version}", *lines, ""))


def from_text(text: str) -> tuple[int, Shape]:
    """Return version and shape of the file."""
    version, *lines = text.splitlines()
    parts = (line.split(": ", 1) for line in lines)
    return int(version.removeprefix("version ")), {path: frozenset(choices.split(" | ")) for path, choices in parts}


def main() -> None:
    """Record the shape of today."""
    if RECORDED.exists():
        version, recorded = from_text(RECORDED.read_text(encoding="utf-8"))
        if version == FORMAT_VERSION and (broken := violations(recorded, shape())):
            sys.exit(
                "\n".join((*broken[:20], "not recorded: earlier snapshots would be unreadable; see the docstring"))
            )
    RECORDED.write_text(to_text(shape()), encoding="utf-8")


if __name__ == "__main__":
    main()
