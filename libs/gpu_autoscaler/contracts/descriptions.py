"""Descriptions of the fields of generated schemas: the comment at the end of a field's line, else the glossary.

So what the code says about a field is what its users read. Without source files the schemas have fewer descriptions.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import inspect

from gpu_autoscaler.contracts.glossary import GLOSSARY

_Schemas = Mapping[str, Any]
# First words of comments that add to the meaning of the name, which the glossary has.
_QUALIFIERS = frozenset({"1", "10th", "90th", "besides", "for", "from", "in", "negative:", "of", "per", "sum"})


def described(components: _Schemas, declared: Sequence[type]) -> dict[str, Any]:
    """Return the schemas of these types and all they contain, by the name of the type, with a description of each
    property that has none and whose meaning is known."""
    structs = {struct.__name__: struct for struct in _structs(declared)}
    return {
        name: _described(schema, field_comments(structs[name])) if name in structs else schema
        for name, schema in components.items()
    }


def field_comments(struct: type) -> Mapping[str, str]:
    """Return the comments of the fields of a type and of the types it extends."""
    comments: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        comments |= _comments_of_module(base.__module__).get(base.__qualname__, {})
    return comments


def _described(schema: _Schemas, comments: Mapping[str, str]) -> dict[str, Any]:
    properties = {
        name: {"description": text, **shown}
        if "description" not in shown and (text := _description(name, comments.get(name, ""), _is_nullable(shown)))
        else shown
        for name, shown in schema.get("properties", {}).items()
    }
    return {**schema, "properties": properties} if properties else dict(schema)


def _is_nullable(shown: _Schemas) -> bool:
    return {"type": "null"} in shown.get("anyOf", ())


def _description(name: str, comment: str, is_nullable: bool) -> str:  # noqa: FBT001
    meaning = GLOSSARY.get(name, "")
    if not is_nullable and "; null:" in meaning:
        meaning = f"{meaning.split('; null:')[0]}."
    if not comment or not meaning:
        return _sentence(comment) or meaning
    if comment.startswith(("null:", "empty:")):
        return _sentence(f"{meaning.split('; null:')[0].rstrip('.')}; {comment}")
    return f"{meaning} {_sentence(comment)}" if comment.split(maxsplit=1)[0] in _QUALIFIERS else _sentence(comment)


@cache
def _comments_of_module(name: str) -> Mapping[str, Mapping[str, str]]:
    """Return the comments of the fields of each class of a module; none if its source is not there."""
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None or not Path(path).is_file() or Path(path).suffix != ".py":
        return {}
    text = Path(path).read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0]: token.string[1:].strip() for token in tokens if token.type == tokenize.COMMENT}
    return {
        declared.name: {
            field.target.id: _in_json(comments[field.end_lineno])
            for field in declared.body
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and field.end_lineno in comments
            and not comments[field.end_lineno].startswith(("noqa", "type:", "fmt:"))
        }
        for declared in ast.parse(text).body
        if isinstance(declared, ast.ClassDef)
    }


def _in_json(comment: str) -> str:
    """Return the comment in the terms of JSON, without remarks for tools."""
    return re.sub(r"\bNone\b", "null", comment.split("  # ", maxsplit=1)[0])


def _sentence(comment: str) -> str:
    """Return the comment as a sentence; what looks like a value keeps its first letter."""
    if not comment:
        return ""
    first, _, rest = comment.partition(" ")
    is_value = not first.strip(",;").isalpha() or first.endswith(",")
    start = first if is_value else f"{first[0].upper()}{first[1:]}"
    text = f"{start} {rest}" if rest else start
    return text if text.endswith(".") else f"{text}."


def _structs(declared: Sequence[type]) -> Iterator[type]:
    """Yield the structs among these types, and all that they contain."""
    known: set[type] = set()
    ahead: list[object] = list(inspect.multi_type_info(declared))
    while ahead:
        found = ahead.pop()
        if isinstance(found, inspect.StructType):
            if found.cls in known:
                continue
            known.add(found.cls)
            yield found.cls
            ahead += [field.type for field in found.fields]
        elif isinstance(found, inspect.Type):
            parts = [getattr(found, name) for name in found.__struct_fields__]
            ahead += [part for part in parts if isinstance(part, inspect.Type)]
            ahead += [each for part in parts if isinstance(part, tuple) for each in part]
