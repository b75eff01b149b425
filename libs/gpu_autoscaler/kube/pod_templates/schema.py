"""Checks a pod template against Kubernetes' own schema, and reports every violation at once.

The schema is that of the API server which the contract tests run, in `pod_template.json` with its source. It knows
fields and types; what the API server checks beyond (for example the name of a mounted volume that does not exist) ends
the job with the server's message. `python -m tests.controlplane.pod_schema` writes the file.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from gpu_autoscaler.model.jobs import Violation
from gpu_autoscaler.model.resources import parse_quantity_milli

FILE_NAME = "pod_template.json"
_ROOT = "PodTemplateSpec"
_KNOWN_COUNT_MAX = 12  # names that are listed where none is near
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}
# Values that JSON writes as numbers or text.
_MIXED = frozenset({"Quantity", "IntOrString"})


@cache
def _definitions() -> Mapping[str, Any]:
    text = (files("gpu_autoscaler.kube.pod_templates") / FILE_NAME).read_bytes()
    definitions: Mapping[str, Any] = msgspec.json.decode(text)["definitions"]
    return definitions


def schema_violations(template: Mapping[str, Any], at: str) -> Iterator[Violation]:
    """Yield every unknown, missing and mistyped field, with its path below `at`."""
    yield from _violations(dict(template), _definitions()[_ROOT], at)


def _violations(value: object, node: Mapping[str, Any], path: str) -> Iterator[Violation]:
    reference = node.get("$ref")
    if reference in _MIXED:
        yield from _mixed_violations(value, str(reference), path)
        return
    if reference is not None:
        node = _definitions()[reference]
    kind = str(node.get("type", "object"))
    if value is None:
        yield Violation(path, f"is null; set {_article(kind)}, or remove it")
    elif not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield Violation(path, f"is {type(value).__name__} {_shown(value)}; Kubernetes expects {_article(kind)}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _violations(item, node["items"], f"{path}[{index}]")
    elif isinstance(value, dict):
        yield from _object_violations(value, node, path)


def _object_violations(value: dict[str, Any], node: Mapping[str, Any], path: str) -> Iterator[Violation]:
    for name in node.get("required", ()):
        if name not in value:
            yield Violation(f"{path}.{name}", "is missing; Kubernetes requires it")
    fields, others = node.get("properties"), node.get("additionalProperties")
    for name, item in value.items():
        if fields is not None and name in fields:
            yield from _violations(item, fields[name], f"{path}.{name}")
        elif others is not None:
            yield from _violations(item, others, f"{path}.{name}")
        elif fields is not None:
            yield Violation(f"{path}.{name}"[:200], _unknown(name, tuple(fields)))


def _unknown(name: str, known: tuple[str, ...]) -> str:
    nearest = get_close_matches(name, known, n=1)
    if nearest:
        return f"is no field of Kubernetes; did you mean {nearest[0]}?"
    listed = ", ".join(known[:_KNOWN_COUNT_MAX]) + (", ..." if len(known) > _KNOWN_COUNT_MAX else "")
    return f"is no field of Kubernetes; remove it (known: {listed})"


def _mixed_violations(value: object, reference: str, path: str) -> Iterator[Violation]:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        yield Violation(path, f"is {_shown(value)}; set a number or text")
        return
    if reference == "Quantity":
        try:
            amount = parse_quantity_milli(str(value))
        except ValueError:
            yield Violation(path, f"{_shown(value)} is not a Kubernetes quantity (examples: 500m, 2, 16Gi)")
            return
        if amount < 0:
            yield Violation(path, f"{_shown(value)} is negative; set zero or more")


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
