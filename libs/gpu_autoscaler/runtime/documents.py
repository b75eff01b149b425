"""Validates a decoded document (TOML, YAML) against a struct and reports every error at once, each with its path.

msgspec stops at the first error; this module walks the structs.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec

from gpu_autoscaler.model.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)
_YAML_SUFFIXES = (".yaml", ".yml", ".json")


def load_toml(path: Path) -> dict[str, Any]:
    """Return the decoded file. Raises ConfigError when it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(str(path), [f"cannot be read ({exc.strerror}); pass the path of a readable file"]) from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(str(path), [f"invalid TOML: {exc}"]) from exc


def load_documents(path: Path) -> list[Any]:
    """Return the documents of a YAML file (`.yaml`, `.yml`, `.json`), else the one of a TOML file. Empty documents are
    omitted. Raises ConfigError when the file cannot be read."""
    if path.suffix not in _YAML_SUFFIXES:
        return [load_toml(path)]
    import yaml  # noqa: PLC0415 - slow to load, and most files are TOML

    try:
        return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document is not None]
    except OSError as exc:
        raise ConfigError(str(path), [f"cannot be read ({exc.strerror}); pass the path of a readable file"]) from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(str(path), [f"invalid YAML: {' '.join(str(exc).split())}"]) from exc


def validation_errors(document: object, schema: type[msgspec.Struct], at: str = "") -> list[str]:
    """Return one sentence per error: unknown keys with the nearest known one, wrong types, missing keys."""
    if not isinstance(document, Mapping):
        return [f"{at or 'document'}: must be a table, got {type(document).__name__}"]
    fields = {field.encode_name: field for field in msgspec.structs.fields(schema)}
    errors = [unknown_name(_path(at, key), key, fields) for key in document if key not in fields]
    for name, field in fields.items():
        if name in document:
            errors += _value_errors(document[name], field.type, _path(at, name))
        elif field.required:
            errors.append(f"{_path(at, name)}: missing; add it")
    return errors


def read_struct(document: Mapping[str, Any], schema: type[S], source: str) -> S:
    """Return the struct that the document describes. Raises ConfigError listing every error."""
    if errors := validation_errors(document, schema):
        raise ConfigError(source, errors)
    return msgspec.convert(document, schema)


def unknown_name(path: str, name: str, known: Iterable[str], kind: str = "key") -> str:
    """Return the error about an unknown name, with the nearest known one."""
    known = tuple(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"{path}: unknown {kind} {name!r}" + (
        f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known) or 'none'}"
    )


def struct_of(annotation: Any) -> type[msgspec.Struct] | None:  # noqa: ANN401 - a type expression has no type
    """Return the struct of a field's annotation, None for any other type."""
    bare = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return bare if isinstance(bare, type) and issubclass(bare, msgspec.Struct) else None


def _value_errors(value: object, annotation: Any, path: str) -> list[str]:  # noqa: ANN401 - as struct_of
    """Return the errors of a value and of all structs in it."""
    bare = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    schemas = [schema for part in _alternatives(bare) if (schema := struct_of(part)) is not None]
    if len(schemas) == 1 and (value is not None or struct_of(bare) is not None):
        return validation_errors(value, schemas[0], path)
    if len(schemas) > 1 and isinstance(value, Mapping):
        tags = {config.tag: schema for schema in schemas if (config := schema.__struct_config__).tag is not None}
        field = schemas[0].__struct_config__.tag_field
        tag = value.get(field)
        if isinstance(tag, str) and (chosen := tags.get(tag)) is not None:
            return validation_errors({key: part for key, part in value.items() if key != field}, chosen, path)
    errors: list[str] = []
    arguments = get_args(bare)
    if get_origin(bare) is tuple and isinstance(value, list) and len(arguments) == 2 and arguments[1] is Ellipsis:
        parts = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        errors = [error for at, item in parts for error in _value_errors(item, arguments[0], at)]
    elif get_origin(bare) is dict and isinstance(value, Mapping):
        errors = [error for key, part in value.items() for error in _value_errors(part, arguments[1], _path(path, key))]
    if not errors:
        try:
            msgspec.convert(value, annotation)
        except msgspec.ValidationError as exc:
            errors.append(f"{path}: {exc}; correct the value")
    return errors


def _alternatives(bare: Any) -> tuple[Any, ...]:  # noqa: ANN401 - as struct_of
    """Return the parts of a union, else the type itself."""
    return get_args(bare) if get_origin(bare) in {Union, UnionType} else (bare,)


def _path(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
