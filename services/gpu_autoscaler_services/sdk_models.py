"""Writes the SDK's types, `libs/gpu_manager_sdk/models.py`, from the OpenAPI document, and with `filters` those of the
filters of lists, `filters.py`. Used by `make schemas`."""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from gpu_autoscaler_services.gateway import openapi

JsonSchema = Mapping[str, Any]

_PREFIX = "#/components/schemas/"
_SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_HEADER = '''\
"""Types of the gateway's requests and answers. Generated from the OpenAPI document by `make schemas`; do not edit.

None means unknown or not yet, never zero. A newer gateway may send more fields, which are ignored, and more values of
an enumeration, which are kept.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct


class _OpenEnum(StrEnum):
    """An enumeration that keeps the values which a newer gateway adds."""

    @classmethod
    def _missing_(cls, value: object) -> "_OpenEnum | None":
        if not isinstance(value, str):
            return None
        member = str.__new__(cls, value)
        member._name_, member._value_ = value, value
        return member
'''

_FILTERS_HEADER = '''\
"""Filters of the lists. Generated from the OpenAPI document by `make schemas`; do not edit."""

from collections.abc import Sequence
from datetime import datetime
from typing import TypedDict
'''


def models(document: Mapping[str, Any]) -> str:
    """Return the module's text: one class for each schema, each after the ones it names."""
    schemas: Mapping[str, JsonSchema] = document["components"]["schemas"]
    bodies = [
        operation["requestBody"]["content"][media_type]["schema"]
        for path in document["paths"].values()
        for operation in path.values()
        if "requestBody" in operation
        for media_type in operation["requestBody"]["content"]
    ]
    requests = {name for body in bodies for name in _needed(body, schemas)}
    ordered = dict.fromkeys(name for schema in sorted(schemas) for name in (*_needed(schemas[schema], schemas), schema))
    tags = {
        _name(reference): (union["discriminator"]["propertyName"], tag)
        for schema in schemas.values()
        for union in schema.get("properties", {}).values()
        if "discriminator" in union
        for tag, reference in union["discriminator"]["mapping"].items()
    }
    classes = [
        _enum(name, schemas[name])
        if "enum" in schemas[name]
        else _struct(name, schemas, tags.get(name), is_request=name in requests)
        for name in ordered
    ]
    return "\n\n".join([_HEADER, *classes])


def filters(document: Mapping[str, Any]) -> str:
    """Return the text of the module of filters: a class for each list in pages."""
    return "\n\n".join([_FILTERS_HEADER, *_filters(document["paths"], document["components"]["schemas"])])


def _filters(paths: Mapping[str, Any], schemas: Mapping[str, JsonSchema]) -> Iterator[str]:
    for operation in (operation for path in paths.values() for operation in path.values()):
        parameters = {shown["name"]: shown["schema"] for shown in operation.get("parameters", ())}
        if not {"cursor", "limit"} < parameters.keys() or operation["operationId"].endswith("_alias"):
            continue
        name = "".join(word.capitalize() for word in operation["operationId"].split("_")) + "Filters"
        fields = [
            f"    {field}: {_filter_type(schema, schemas)}\n"
            for field, schema in parameters.items()
            if field not in {"cursor", "limit"}
        ]
        head = f'class {name}(TypedDict, total=False):\n    """Filters of {operation["operationId"]}."""\n'
        yield f"{head}\n{''.join(fields)}"


def _filter_type(schema: JsonSchema, schemas: Mapping[str, JsonSchema]) -> str:
    """Return the type of a filter; a value of an enumeration may be given as its text."""
    declared = _type(schema, is_request=True)
    for name, shown in schemas.items():
        if "enum" in shown:
            declared = re.sub(rf"\b{name}\b", "str", declared)
    return declared


def _name(reference: str) -> str:
    return reference.removeprefix(_PREFIX)


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield _name(schema["$ref"])
        for key, value in schema.items():
            if key != "discriminator":
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _needed(schema: JsonSchema, schemas: Mapping[str, JsonSchema]) -> Iterator[str]:
    """Yield the names that a schema needs, each after its own needs. No schema contains itself."""
    for name in _references(dict(schema)):
        yield from _needed(schemas[name], schemas)
        yield name


def _enum(name: str, schema: JsonSchema) -> str:
    members = "".join(f'    {value.upper().replace("-", "_")} = "{value}"\n' for value in schema["enum"])
    return f'class {name}(_OpenEnum):\n    """{_sentence(schema)}"""\n\n{members}'


def _sentence(schema: JsonSchema) -> str:
    return str(schema.get("description", "")).partition("\n\n")[0].replace("\n", " ").strip() or "A value."


def _struct(name: str, schemas: Mapping[str, JsonSchema], tag: tuple[str, str] | None, *, is_request: bool) -> str:
    schema = schemas[name]
    options = ["frozen=True", "kw_only=True"]
    if is_request:
        options.append("omit_defaults=True")  # the gateway's defaults apply, those of its release
    if tag is not None:
        options += [f'tag_field="{tag[0]}"', f'tag="{tag[1]}"']
    required = schema.get("required", ())
    lines = []
    for field, property_ in schema.get("properties", {}).items():
        if tag is not None and field == tag[0]:
            continue
        declared = _type(property_, is_request=is_request)
        if field in required:
            lines.append(f"    {field}: {declared}\n")
        else:
            lines.append(f"    {field}: {declared} = {_default(property_, schemas)}\n")
    fields = f"\n{''.join(lines)}" if lines else ""
    return f'class {name}(Struct, {", ".join(options)}):\n    """{_sentence(schema)}"""\n{fields}'


def _type(schema: JsonSchema, *, is_request: bool) -> str:
    if "$ref" in schema:
        return _name(schema["$ref"])
    if "anyOf" in schema:
        return " | ".join(_type(part, is_request=is_request) for part in schema["anyOf"])
    if schema.get("format") == "date-time":
        return "datetime"
    if schema.get("type") == "array":
        item = _type(schema["items"], is_request=is_request) if "items" in schema else "Any"
        return f"Sequence[{item}]" if is_request else f"tuple[{item}, ...]"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        value = _type(values, is_request=is_request) if isinstance(values, dict) and values else "Any"
        return f"Mapping[str, {value}]" if is_request else f"dict[str, {value}]"
    if "type" not in schema:
        return "str" if "enum" in schema else "Any"
    return _SCALARS[schema["type"]]


def _default(schema: JsonSchema, schemas: Mapping[str, JsonSchema]) -> str:
    default = schema["default"]
    if "$ref" in schema and isinstance(default, dict):
        target = schemas[_name(schema["$ref"])]["properties"]
        own = {field: property_.get("default") for field, property_ in target.items()}
        changed = {field: value for field, value in default.items() if own.get(field) != value}
        return f"{_name(schema['$ref'])}({', '.join(f'{field}={value!r}' for field, value in changed.items())})"
    if default == []:
        return "()"
    return f'"{default}"' if isinstance(default, str) else repr(default)


if __name__ == "__main__":
    write = filters if sys.argv[1:] == ["filters"] else models
    sys.stdout.write(write(openapi.document()))
