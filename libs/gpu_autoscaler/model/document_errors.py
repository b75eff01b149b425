"""Every error of a decoded document at once, each with its path: unknown keys, wrong types, missing keys.

msgspec stops at the first error; this module walks the structs.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from itertools import islice
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

ERRORS_COUNT_MAX = 50  # named in one message. Project default.
_NAME_LENGTH_MAX = 100  # of an unknown key, as errors quote it. Project default.


def all_errors(payload: bytes, schema: type[msgspec.Struct], first: Exception) -> str:
    """Return every error of encoded JSON that did not decode; only the `first`, where it is not JSON."""
    try:
        errors = first_errors(msgspec.json.decode(payload), schema)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return str(first)
    is_all = len(errors) <= ERRORS_COUNT_MAX
    return "; ".join((*errors[:ERRORS_COUNT_MAX], *(() if is_all else ("more are not listed",)))) or str(first)


def first_errors(document: object, schema: type[msgspec.Struct]) -> list[str]:
    """Return the first errors, one more than are to be listed: a document from outside may have a million."""
    return list(islice(validation_errors(document, schema), ERRORS_COUNT_MAX + 1))


def validation_errors(document: object, schema: type[msgspec.Struct], at: str = "") -> Iterator[str]:
    """Yield one sentence per error: unknown keys with the nearest known one, wrong types, missing keys."""
    if not isinstance(document, Mapping):
        yield f"{at or 'document'}: must be a table, got {type(document).__name__}"
        return
    fields = {field.encode_name: field for field in msgspec.structs.fields(schema)}
    for key in document:
        if key not in fields:
            yield unknown_name(_path(at, key), key, fields)
    for name, field in fields.items():
        if name in document:
            yield from _value_errors(document[name], field.type, _path(at, name))
        elif field.required:
            yield f"{_path(at, name)}: missing; add it"


def unknown_keys(document: object, schema: type[msgspec.Struct], at: str = "") -> Iterator[str]:
    """Yield the errors of unknown keys alone, as `validation_errors` has them, in a fraction of its time.

    Without those in lists and unions of structs.
    """
    known = _parts(schema)
    for key, value in document.items() if isinstance(document, Mapping) else ():
        if key not in known:
            name = key if len(key) <= _NAME_LENGTH_MAX else f"{key[:_NAME_LENGTH_MAX]}..."
            yield unknown_name(_path(at, name), name, known)
        elif (part := known[key]) is not None:
            yield from unknown_keys(value, part, _path(at, key))


@cache  # few types are checked so
def _parts(schema: type[msgspec.Struct]) -> Mapping[str, type[msgspec.Struct] | None]:
    return {field.encode_name: struct_of(field.type) for field in msgspec.structs.fields(schema)}


def unknown_name(path: str, name: str, known: Iterable[str]) -> str:
    """Return the error about an unknown name, with the nearest known one."""
    known = tuple(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"{path}: unknown key {name!r}" + (
        f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known) or 'none'}"
    )


def struct_of(annotation: Any) -> type[msgspec.Struct] | None:  # noqa: ANN401 - a type expression has no type
    """Return the struct of a field's annotation, None for any other type."""
    bare = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return bare if isinstance(bare, type) and issubclass(bare, msgspec.Struct) else None


def _value_errors(value: object, annotation: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - as struct_of
    """Yield the errors of a value and of all structs in it."""
    bare = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    schemas = [schema for part in _alternatives(bare) if (schema := struct_of(part)) is not None]
    if len(schemas) == 1 and (value is not None or struct_of(bare) is not None):
        yield from validation_errors(value, schemas[0], path)
        return
    if len(schemas) > 1 and isinstance(value, Mapping):
        tags = {config.tag: schema for schema in schemas if (config := schema.__struct_config__).tag is not None}
        field = schemas[0].__struct_config__.tag_field
        tag = value.get(field)
        if isinstance(tag, str) and (chosen := tags.get(tag)) is not None:
            yield from validation_errors({key: part for key, part in value.items() if key != field}, chosen, path)
            return
    limits = [part.max_length for part in get_args(annotation) if isinstance(part, msgspec.Meta)]
    is_too_long = isinstance(value, list) and any(limit is not None and len(value) > limit for limit in limits)
    is_valid = True
    for error in () if is_too_long else _part_errors(value, bare, path):
        is_valid = False
        yield error
    if is_valid:
        try:
            msgspec.convert(value, annotation)
        except msgspec.ValidationError as exc:
            yield f"{path}: {exc}; {remedy(exc, annotation)}"


def remedy(error: msgspec.ValidationError, annotation: Any) -> str:  # noqa: ANN401 - as struct_of
    """Return the next step after a value that its type refuses: the valid names, an example, or a general one."""
    if str(error).startswith("Invalid enum value") and (names := _names(annotation)):
        return f"use one of {', '.join(names)}"
    return "example: 2026-11-21T08:00:00Z" if "RFC3339" in str(error) else "correct the value"


def _names(annotation: Any) -> list[str]:  # noqa: ANN401 - as struct_of
    """Return the names of the enum or literal in a type."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(member.value) for member in annotation]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [name for part in get_args(annotation) for name in _names(part)]


def _part_errors(value: object, bare: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - as struct_of
    """Yield the errors of the items of a list or table."""
    arguments = get_args(bare)
    if get_origin(bare) is tuple and isinstance(value, list) and len(arguments) == 2 and arguments[1] is Ellipsis:
        for index, item in enumerate(value):
            yield from _value_errors(item, arguments[0], f"{path}[{index}]")
    elif get_origin(bare) is dict and isinstance(value, Mapping):
        for key, part in value.items():
            yield from _value_errors(part, arguments[1], _path(path, key))


def _alternatives(bare: Any) -> tuple[Any, ...]:  # noqa: ANN401 - as struct_of
    """Return the parts of a union, else the type itself."""
    return get_args(bare) if get_origin(bare) in {Union, UnionType} else (bare,)


def _path(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
