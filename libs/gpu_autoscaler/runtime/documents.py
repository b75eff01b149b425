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


def read_struct(document: Mapping[str, Any], schema: type[S], source: str) -> S:
    """Return the struct that the document describes. Raises ConfigError listing every error."""
    if errors := list(validation_errors(document, schema)):
        raise ConfigError(source, errors)
    return msgspec.convert(document, schema)
