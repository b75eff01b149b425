"""The house rules as functions: a path and its text in, sentences about what is wrong out. Empty means tidy."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 60

# What would let a clock, the world or chance into a decision.
IMPURE_MODULES = {
    "aiohttp", "asyncio", "concurrent", "glob", "http", "importlib", "io", "logging", "multiprocessing", "nats", "os",
    "pathlib", "random", "secrets", "shutil", "signal", "socket", "sqlite3", "structlog", "subprocess", "sys",
    "tempfile", "threading", "time", "urllib", "uuid", "warnings",
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "now", "utcnow", "today"}

# Split so that this file does not name what it forbids.
INDEX_ADDRESSES = re.compile(
    "|".join(re.escape(first + second) for first, second in (
        ("pypi", ".org"), ("python", "hosted.org"), ("registry.npm", "js.org"), ("proxy.golang", ".org"),
        ("static.crates", ".io"), ("index.crates", ".io"), ("repo1.maven", ".org"), ("deb.debian", ".org"),
    ))
)  # fmt: skip
MACHINE_PATHS = re.compile("|".join(("/ro" + "ot/", "/wo" + "rk/", "/ho" + "me/[a-z]")))
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b|NotImplemented" + "Error")

NAME_GRAMMAR = re.compile(r"^[a-z]+\.[a-z]+(_[a-z]+)*$")
UNIT_SUFFIXES = (
    "seconds", "bytes", "count", "ratio", "celsius", "watts", "usd_per_hour", "micro_usd", "hours", "gib",
    "gpus_per_job",
    "priority",
)  # fmt: skip


def file_size(path: Path, text: str) -> Iterator[str]:
    """No file is longer than a reader's patience."""
    lines = text.count("\n")
    if lines > FILE_LINES_MAX:
        yield f"{path}: {lines} lines, at most {FILE_LINES_MAX}; split it by what it is for"


def function_size(path: Path, text: str) -> Iterator[str]:
    """No function is longer than a screen."""
    for function in _functions(text):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield f"{path}:{function.lineno}: {function.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def docstrings(path: Path, text: str) -> Iterator[str]:
    """Every module, public class and public function says what it is for."""
    tree = ast.parse(text)
    if not ast.get_docstring(tree):
        yield f"{path}: the module has no docstring"
    for item in tree.body:
        match item:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if not name.startswith("_") and not ast.get_docstring(item):
                    yield f"{path}:{item.lineno}: {name} has no docstring"


def purity(path: Path, text: str) -> Iterator[str]:
    """The core is arithmetic: no IO, clock, randomness, logging, async."""
    for item in ast.walk(ast.parse(text)):
        match item:
            case ast.Import(names=names):
                imported = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module)):
                imported = [module]
            case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                yield f"{path}:{item.lineno}: async in the core; time and answers come in as facts"
                continue
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in IMPURE_CALLS:
                yield f"{path}:{item.lineno}: call of {name}; the core has no clock and no IO"
                continue
            case _:
                continue
        for module in imported:
            if module.split(".")[0] in IMPURE_MODULES:
                yield f"{path}:{item.lineno}: import of {module}; the core is arithmetic"


def addresses(path: Path, text: str) -> Iterator[str]:
    """No file names a package index, and none a path of somebody's machine."""
    for number, line in enumerate(text.splitlines(), 1):
        if INDEX_ADDRESSES.search(line):
            yield f"{path}:{number}: names a package index; locks and docs work with any"
        if MACHINE_PATHS.search(line):
            yield f"{path}:{number}: names a path of one machine"


def unfinished(path: Path, text: str) -> Iterator[str]:
    """What is here works; what does not is not here."""
    for number, line in enumerate(text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield f"{path}:{number}: a note of unfinished work: {line.strip()[:60]}"


def fact_grammar(module: str, class_name: str, subject_root: str, type_name: str, stream: str) -> Iterator[str]:
    """One name makes the rest: class, file, subject, type, stream."""
    domain = subject_root.split(".", maxsplit=1)[0]
    words = "".join(word.capitalize() for word in re.split(r"[._]", subject_root))
    if not NAME_GRAMMAR.match(subject_root):
        yield f"{class_name}: subject {subject_root!r} is not <domain>.<words>"
    if words != class_name:
        yield f"{class_name}: the class of subject {subject_root!r} is called {words}"
    if module.rsplit(".", 1)[-1] != domain:
        yield f"{class_name}: belongs into events/{domain}.py, stands in {module}"
    if not re.fullmatch(re.escape(subject_root) + r"\.v[1-9][0-9]*", type_name):
        yield f"{class_name}: type {type_name!r} is not {subject_root}.v<number>"
    if stream != domain.upper():
        yield f"{class_name}: stream {stream!r} is not {domain.upper()}"
    if not _is_past_tense(subject_root):
        yield f"{class_name}: a fact is in the past tense and gives no orders"


_IRREGULAR_PAST = {"made", "gone", "begun", "lost", "sent", "told", "given", "taken", "withdrawn", "met", "held"}


def _is_past_tense(subject_root: str) -> bool:
    last = re.split(r"[._]", subject_root)[-1]
    return last.endswith("ed") or last in _IRREGULAR_PAST


def policy_field(name: str, description: str, *, is_number: bool, has_range: bool) -> Iterator[str]:
    """A threshold says its unit in its name, what it may be, and where its default comes from."""
    if "Source:" not in description:
        yield f"policy field {name}: its description names no source"
    stem = re.sub(r"_(max|min|default)$", "", name)
    if is_number and not stem.endswith(UNIT_SUFFIXES):
        yield f"policy field {name}: the name carries no unit ({', '.join(UNIT_SUFFIXES)})"
    if is_number and not has_range:
        yield f"policy field {name}: its type says no range; give it Meta(ge=..., le=...)"


def policy_use(name: str, deciding: str) -> Iterator[str]:
    """A threshold that no decision reads is a promise that nobody keeps. `deciding` is the source of all that does."""
    if re.search(rf"\.{name}\b", deciding) is None:
        yield f"policy field {name}: no decision reads it; give it its effect, or take it away"


def readme_table(readme: str) -> dict[str, set[str]]:
    """Return the rows `| consumes | a, b |` of a service's README as name -> set of words."""
    rows: dict[str, set[str]] = {}
    for line in readme.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 2 and cells[0].strip("`") in {
            "consumes", "folds", "publishes", "urgent", "tick_seconds",
        }:  # fmt: skip
            words = {word.strip().strip("`") for word in cells[1].split(",")}
            rows[cells[0].strip("`")] = words - {"-", ""}
    return rows


def service_readme(name: str, readme: str, declared: dict[str, set[str]]) -> Iterator[str]:
    """A service's README says what the service declares, no more and no less."""
    told = readme_table(readme)
    for row, words in declared.items():
        if row not in told:
            yield f"{name}/README.md: no row {row!r}; it should say: {', '.join(sorted(words)) or '-'}"
        elif told[row] != words:
            missing, extra = sorted(words - told[row]), sorted(told[row] - words)
            yield f"{name}/README.md: row {row!r} differs: missing {missing}, not declared {extra}"


_NOTES = {"note", "note_whole", "note_always"}


def noted_comparisons(path: Path, text: str) -> Iterator[str]:
    """When time changes a decision is noted: what is computed from `as_of` is compared only where that is noted.

    A comparison of `as_of` itself notes its instant, a sum or difference does not (`core/next_change.py`).
    """
    for function in _functions(text):
        calls = {
            call.func.id
            for call in ast.walk(function)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        }
        if calls & _NOTES:
            continue
        derived = {
            name.id
            for item in ast.walk(function)
            if isinstance(item, ast.Assign | ast.AnnAssign | ast.NamedExpr) and item.value and _is_derived(item.value)
            for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        }
        for item in ast.walk(function):
            if not isinstance(item, ast.Compare) or all(isinstance(op, ast.Is | ast.IsNot) for op in item.ops):
                continue
            sides = (item.left, *item.comparators)
            if any(_is_derived(side) or (isinstance(side, ast.Name) and side.id in derived) for side in sides):
                yield (
                    f"{path}:{item.lineno}: compares what is computed from as_of, which notes nothing; compare as_of"
                    " itself, or use has_lasted of core/next_change.py"
                )


def _is_derived(expression: ast.expr) -> bool:
    """True for a sum, a difference or a timestamp of `as_of`, also inside of a call such as `max`."""
    for item in ast.walk(expression):
        match item:
            case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right) if _is_as_of(left) or _is_as_of(right):
                return True
            case ast.Call(func=ast.Attribute(value=value, attr="timestamp")) if _is_as_of(value):
                return True
            case _:
                pass
    return False


def _is_as_of(expression: ast.expr) -> bool:
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lstrip("_") == "as_of"
        case _:
            return False


def _functions(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for item in ast.walk(ast.parse(text)):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            yield item
