"""Digests of the code and the policy that a plan was computed with, and of job requests."""

import ast
import gc
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path

import msgspec

import gpu_autoscaler
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.job import JobRequested

# Everything that a plan is computed with. Nothing else is read while planning.
_SOURCES = ("model", "events", "core")
# Modules that only explain decisions, and those of the reasons.
_EXPLANATIONS = ("core/explain/", "model/format")
_REASONS = "model/reasons"
_KEPT_FILE = "core.digest"
_META_TEXTS = frozenset({"title", "description", "examples"})
# The fields of the first version of a request. A later field is in the digest only with a value other than its default,
# so that a request without it keeps the digest that earlier versions stored.
_FIRST_FIELDS = frozenset(
    {
        "budget_limit_usd",
        "container",
        "gpu_requirements",
        "job_id",
        "job_name",
        "max_duration_hours",
        "members",
        "preemptible",
        "priority",
        "project_id",
        "resources",
        "run_seconds",
        "start_by_at",
        "within",
        "workload_type",
    }
)


@cache
def core_digest() -> str:
    """Return 32 hex digits over the code of everything that decides; equal code, equal digest, on any machine.

    Computed once per process, or read beside the compiled modules, where an earlier process kept it. See `code_digest`.
    """
    return kept_digest(Path(gpu_autoscaler.__file__).parent, Path(cache_from_source(gpu_autoscaler.__file__)).parent)


def kept_digest(root: Path, folder: Path) -> str:
    """Return the digest of the core below `root`. To parse all files takes half a second, so the digest is kept in
    `folder` for other processes, for exactly these sources; where the folder is read-only, each process computes it."""
    paths = sorted(path for source in _SOURCES for path in (root / source).rglob("*.py"))
    sources = [(path.relative_to(root).as_posix(), path.read_bytes()) for path in paths]
    of_sources = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=16)
    for name, source in sources:
        of_sources.update(b"%b\0%d\0%b" % (name.encode(), len(source), source))
    kept = folder / _KEPT_FILE
    with suppress(OSError, ValueError):
        key, digest = kept.read_text(encoding="ascii").split()
        if key == of_sources.hexdigest():
            return digest
    with _without_collections():
        digest = code_digest((name, source.decode()) for name, source in sources)
    if not sys.dont_write_bytecode:
        with suppress(OSError):  # moved into place whole: other processes start at the same time
            written = kept.with_suffix(f".{os.getpid()}")
            written.write_text(f"{of_sources.hexdigest()} {digest}\n", encoding="ascii")
            written.replace(kept)
    return digest


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause the collector of reference cycles: syntax trees have none, and it would search them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def code_digest(modules: Iterable[tuple[str, str]]) -> str:
    """Return 32 hex digits over modules, each a path below the package and its source, in a fixed order.

    Only what decides counts, not what explains: left out are comments, docstrings, texts of `msgspec.Meta`, the modules
    of _EXPLANATIONS, and everything in model/reasons but its types and their fields. The digest is over the syntax tree
    without empty fields, so that it is equal on every Python version (3.12 and 3.13 added fields that are empty here).
    """
    digest = hashlib.blake2b(digest_size=16)
    for path, source in modules:
        if not path.startswith(_EXPLANATIONS):
            tree = ast.parse(source)
            if path.startswith(_REASONS):
                tree = _types_alone(tree)
            parts = [path]
            _write(tree, parts)
            digest.update("\0".join(parts).encode())
    return digest.hexdigest()


def _types_alone(tree: ast.Module) -> ast.Module:
    """Return a module of reasons without functions, private constants and imports: its types and their fields."""
    kept = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom)]
    tree.body = [node for node in kept if not _is_private_constant(node)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            node.body = [part for part in node.body if not isinstance(part, ast.FunctionDef) or part.name == "tag"]
    return tree


def _is_private_constant(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id.startswith("_") for target in targets)


def _write(node: ast.AST, parts: list[str]) -> None:
    """Append the node, its fields and their values; skip empty fields, docstrings and texts of `msgspec.Meta`."""
    parts.append(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, ast.expr_context) or name in ("kind", "type_comment"):
            continue
        if isinstance(value, ast.AST):
            parts.append(name)
            _write(value, parts)
        elif isinstance(value, list):
            if items := [item for item in value if not _is_text(item, node)]:
                parts.append(f"{name}[")
                for item in items:
                    if isinstance(item, ast.AST):
                        _write(item, parts)
                    else:
                        parts.append(repr(item))
                parts.append("]")
        elif value is not None or type(node) is ast.Constant:
            parts += (name, repr(value))


def _is_text(item: object, parent: ast.AST) -> bool:
    """True for a docstring, and for a keyword of `msgspec.Meta` that only describes."""
    if type(item) is ast.Expr:
        return type(item.value) is ast.Constant and type(item.value.value) is str
    if type(item) is not ast.keyword or item.arg not in _META_TEXTS or type(parent) is not ast.Call:
        return False
    function = parent.func
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) == "Meta"


def policy_digest(policy: ScalingPolicy) -> str:
    """Return 32 hex digits over every value of the policy, defaults included."""
    return hashlib.blake2b(msgspec.json.encode(policy, order="sorted"), digest_size=16).hexdigest()


def request_digest(request: JobRequested) -> str:
    """Return 32 hex digits over the request without its job id, which a client may leave to the scheduler, and without
    who submits it: a repeat may come with another token."""
    anonymous = msgspec.structs.replace(request.without_template(), job_id=None, submitted_by="")
    values = msgspec.to_builtins(anonymous)
    for field in msgspec.structs.fields(anonymous):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if field.name not in _FIRST_FIELDS and getattr(anonymous, field.name) == default:
            del values[field.name]
    return hashlib.blake2b(msgspec.json.encode(values, order="sorted"), digest_size=16).hexdigest()
