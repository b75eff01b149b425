"""Google's API descriptions: the valid requests, and the schemas of requests and answers.

The discovery documents in googleapiclient: compute v1, cloudbilling v1 and cloudresourcemanager v3.
"""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

_DOCUMENTS = ("compute.v1.json", "cloudbilling.v1.json", "cloudresourcemanager.v3.json")


class Method(msgspec.Struct, frozen=True):
    """One call of an API."""

    name: str  # instanceGroupManagers.createInstances
    http_method: str
    pattern: re.Pattern[str]  # of the whole path
    parameters: Mapping[str, Mapping[str, Any]]
    request: str | None  # name of the schema of the body
    response: str
    document: str


class Description:
    """All methods and schemas of these APIs."""

    def __init__(self) -> None:
        """Raises ImportError if googleapiclient is not installed."""
        self._schemas: dict[str, Mapping[str, Any]] = {}
        self._common: dict[str, Mapping[str, Any]] = {}
        self._methods: list[Method] = []
        for name in _DOCUMENTS:
            document = _document(name)
            self._schemas[name] = document["schemas"]
            self._common[name] = document["parameters"]
            self._methods += _methods(document, name)

    def find(self, http_method: str, path: str) -> tuple[Method, dict[str, str]] | None:
        """Return the method of a path, and the path's parameters."""
        for method in self._methods:
            match = method.pattern.fullmatch(path)
            if match and method.http_method == http_method:
                return method, match.groupdict()
        return None

    def named(self, name: str) -> Method:
        """Return the method of this name. Raises KeyError."""
        method = next((method for method in self._methods if method.name == name), None)
        if method is None:
            raise KeyError(name)
        return method

    def query_violations(self, method: Method, query: Mapping[str, str]) -> list[str]:
        """Return query parameters that the description does not contain."""
        violations = []
        for name, value in query.items():
            wanted = method.parameters.get(name) or self._common[method.document].get(name)
            if wanted is None or (name in method.parameters and wanted.get("location") != "query"):
                violations.append(f'Unknown name "{name}": Cannot bind query parameter.')
            elif wanted.get("type") == "integer" and not value.isdigit():
                violations.append(f"Invalid value for field {name!r}: {value!r}")
            elif "maximum" in wanted and int(value) > int(wanted["maximum"]):
                violations.append(f"Invalid value for field {name!r}: {value!r} is above {wanted['maximum']}")
        return violations

    def body_violations(self, method: Method, body: object) -> list[str]:
        if method.request is None:
            return [] if body in (None, {}) else ["this call takes no body"]
        return list(self._violations(method.document, {"$ref": method.request}, body, "body"))

    def answer_violations(self, method: Method, body: object) -> list[str]:
        return list(self._violations(method.document, {"$ref": method.response}, body, "answer"))

    def _violations(self, document: str, schema: Mapping[str, Any], value: object, where: str) -> Iterator[str]:
        if "$ref" in schema:
            schema = self._schemas[document][schema["$ref"]]
        kind = schema.get("type")
        if kind == "object":
            if not isinstance(value, dict):
                yield f"Invalid value at {where!r}: an object is wanted"
                return
            named, others = schema.get("properties", {}), schema.get("additionalProperties")
            for key, inner in value.items():
                wanted = named.get(key) or others
                if wanted is None:
                    yield f'Unknown name "{key}" at {where!r}: Cannot find field.'
                else:
                    yield from self._violations(document, wanted, inner, f"{where}.{key}")
        elif kind == "array":
            if not isinstance(value, list):
                yield f"Invalid value at {where!r}: a list is wanted"
                return
            for number, inner in enumerate(value):
                yield from self._violations(document, schema["items"], inner, f"{where}[{number}]")
        elif not _fits(kind, value) or ("enum" in schema and value not in schema["enum"]):
            yield f"Invalid value at {where!r} ({kind}): {value!r}"


@cache
def description() -> Description:
    """Return the descriptions, read once per process."""
    return Description()


def _fits(kind: object, value: object) -> bool:
    if kind == "string":
        return isinstance(value, str)
    if kind == "boolean":
        return isinstance(value, bool)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _document(name: str) -> dict[str, Any]:
    package = importlib.util.find_spec("googleapiclient")
    if package is None or package.origin is None:
        raise ImportError("googleapiclient is not installed", name="googleapiclient")
    path = Path(package.origin).parent / "discovery_cache" / "documents" / name
    document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return document


def _methods(holder: Mapping[str, Any], document: str, base: str | None = None, prefix: str = "") -> Iterator[Method]:
    base = base if base is not None else f"/{holder['servicePath']}"
    for name, described in holder.get("methods", {}).items():
        yield Method(
            name=f"{prefix}{name}",
            http_method=described["httpMethod"],
            pattern=re.compile(re.escape(base) + _pattern(described["path"], described.get("parameters", {}))),
            parameters=described.get("parameters", {}),
            request=described.get("request", {}).get("$ref"),
            response=described["response"]["$ref"] if "response" in described else "Empty",
            document=document,
        )
    for name, resource in holder.get("resources", {}).items():
        yield from _methods(resource, document, base, f"{prefix}{name}.")


def _pattern(path: str, parameters: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the regular expression of a path: `{zone}` is one segment, `{+parent}` has a form of its own."""
    pattern = ""
    for text, plus, name in re.findall(r"([^{]*)(?:\{(\+?)(\w+)\})?", path):
        pattern += re.escape(text)
        if name:
            form = parameters.get(name, {}).get("pattern", "[^/]+").strip("^$") if plus else "[^/]+"
            pattern += f"(?P<{name}>{form})"
    return pattern
