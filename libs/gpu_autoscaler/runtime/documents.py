"""Reads documents (TOML, YAML) into structs and reports every error at once, each with its path."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpu_autoscaler.model.document_errors import validation_errors
from gpu_autoscaler.model.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)
_YAML_SUFFIXES = (".yaml", ".yml", ".json")


def load_toml(path: Path) -> dict[str, Any]:
    """Return the decoded file. Raises ConfigError when it cannot be read or is not TOML."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(str(path), [f"invalid TOML: {exc}"]) from exc


def load_documents(path: Path) -> list[Any]:
    """Return the documents of a YAML file (`.yaml`, `.yml`, `.json`), else the one of a TOML file. Empty documents are
    omitted. Raises ConfigError when the file cannot be read."""
    if path.suffix not in _YAML_SUFFIXES:
        return [load_toml(path)]
    return parse_yaml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(str(path), [f"cannot be read ({reason}); pass the path of a readable file"]) from exc


def parse_yaml(text: str, source: str) -> list[Any]:
    """Return the documents of YAML or JSON; empty ones are omitted. Raises ConfigError."""
    import yaml  # noqa: PLC0415 - slow to load, and most files are TOML

    try:
        return [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as exc:
        reason = " ".join(str(exc).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigError(source, [f"invalid YAML: {reason}"]) from exc


def read_struct(document: Mapping[str, Any], schema: type[S], source: str) -> S:
    """Return the struct that the document describes. Raises ConfigError listing every error."""
    if errors := list(validation_errors(document, schema)):
        raise ConfigError(source, errors)
    return msgspec.convert(document, schema)
