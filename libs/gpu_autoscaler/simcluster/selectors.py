"""Label and field selectors: the text forms of a query and the JSON forms inside objects.

Grammar: Kubernetes documentation, "Labels and Selectors" and "Field Selectors" (read 2026-11-21).
"""

import re
from collections.abc import Callable, Mapping, Sequence

from gpu_autoscaler.simcluster.answers import bad_request
from gpu_autoscaler.simcluster.kinds import Kind
from gpu_autoscaler.simcluster.objects import Json, labels_of

Test = Callable[[Json], bool]

_SET = re.compile(r"^\s*([^\s!=,()]+)\s+(in|notin)\s*\(([^()]*)\)\s*$")
_EQUALITY = re.compile(r"^\s*([^\s!=,()]+)\s*(==|!=|=)\s*([^\s!=,()]*)\s*$")
_EXISTS = re.compile(r"^\s*(!?)\s*([^\s!=,()]+)\s*$")
_COMMA_OUTSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")

_OPERATOR = {"in": "In", "notin": "NotIn", "=": "In", "==": "In", "!=": "NotIn"}


def requirement_met(requirement: Json, values: Mapping[str, str]) -> bool:
    """Return whether one `{key, operator, values}` holds for these labels."""
    return operator_holds(requirement["operator"], values.get(requirement["key"]), requirement.get("values") or ())


def operator_holds(operator: str, value: str | None, wanted: Sequence[str]) -> bool:
    """Return whether a label's value (None: the label is missing) meets the operator and values of a requirement."""
    if operator == "In":
        return value is not None and value in wanted
    if operator == "NotIn":
        return value is None or value not in wanted
    if operator == "Exists":
        return value is not None
    if operator == "DoesNotExist":
        return value is None
    if value is None or len(wanted) != 1 or not _is_integer(value) or not _is_integer(wanted[0]):
        return False
    return int(value) > int(wanted[0]) if operator == "Gt" else int(value) < int(wanted[0])


def _is_integer(text: str) -> bool:
    return text.lstrip("-").isdigit()


def selector_matches(selector: Json | None, labels: Mapping[str, str]) -> bool:
    """Return whether an object's `{matchLabels, matchExpressions}` selects these labels; None selects nothing."""
    if selector is None:
        return False
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items()) and all(
        requirement_met(requirement, labels) for requirement in selector.get("matchExpressions") or ()
    )


def label_requirements(text: str) -> list[Json]:
    """Return the requirements of a `labelSelector` query. Raises ApiRefusal 400."""
    requirements: list[Json] = []
    for part in _COMMA_OUTSIDE_PARENTHESES.split(text) if text.strip() else ():
        if match := _SET.match(part):
            values = [value.strip() for value in match[3].split(",")]
            requirements.append({"key": match[1], "operator": _OPERATOR[match[2]], "values": values})
        elif match := _EQUALITY.match(part):
            requirements.append({"key": match[1], "operator": _OPERATOR[match[2]], "values": [match[3]]})
        elif match := _EXISTS.match(part):
            requirements.append({"key": match[2], "operator": "DoesNotExist" if match[1] else "Exists"})
        else:
            raise bad_request(f"unable to parse requirement: found '{part.strip()}', expected a label requirement")
    return requirements


def field_requirements(kind: Kind, text: str) -> list[tuple[str, bool, str]]:
    """Return (path, must be equal, value) of a `fieldSelector` query. Raises ApiRefusal 400."""
    requirements = []
    for part in filter(None, text.split(",")):
        match = _EQUALITY.match(part)
        if not match:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        if match[1] not in ("metadata.name", "metadata.namespace", *kind.fields):
            raise bad_request(f"field label not supported: {match[1]}")
        requirements.append((match[1], match[2] != "!=", match[3]))
    return requirements


def field_of(item: Json, path: str) -> str:
    """Return the field at a dotted path as text; "" where it is missing."""
    value: object = item
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def query_test(kind: Kind, label_selector: str, field_selector: str) -> Test | None:
    """Return the test for both selectors of a query, None where everything passes. Raises ApiRefusal 400."""
    labels = label_requirements(label_selector)
    fields = field_requirements(kind, field_selector)
    if not labels and not fields:
        return None

    def passes(item: Json) -> bool:
        return all((field_of(item, path) == value) is equal for path, equal, value in fields) and all(
            requirement_met(requirement, labels_of(item)) for requirement in labels
        )

    return passes
