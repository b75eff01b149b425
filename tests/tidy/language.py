"""The style guide as functions (`docs/contributing/style.md`): words, names of modules, grain, names of test files."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

TextRule = Callable[[Path, str], Iterator[str]]
OLD_NAMES = Path(__file__).with_name("old_names.txt")
SMALL_MODULE_LINES = 60
# Packages in which a module name stands once. `service.py` and the modules of each cloud are exempt.
UNIQUE_WITHIN = ("core", "sim", "runtime")

# Phrases of the 0.1 dialect, split so that this file does not contain them. Whole words, any case.
PHRASES = tuple(
    first + second
    for first, second in (
        ("cannot be ", "meant"), ("so ", "many"), ("nobody ", "knows"), ("is ", "told"), ("are ", "told"),
        ("was ", "told"), ("were ", "told"), ("be ", "told"), ("stands in ", "force"), ("stand in ", "force"),
        ("on the ", "shelf"), ("held ", "back"), ("second ", "opinion"), ("make ", "way"), ("makes ", "way"),
        ("let ", "go"), ("be ", "it"), ("in the ", "dark"), ("a ", "wish"), ("wishes ", "for"), ("cheaper ", "kept"),
        ("without a ", "choice"), ("nobody ", "decides"), ("for ", "sale"), ("on ", "sale"), ("a ", "mistake"),
        ("all ", "mistakes"), ("is ", "dear"), ("dearer ", "than"), ("stands ", "still"), ("stood ", "still"),
        ("begun ", "again"), ("begins ", "anew"), ("made ", "anew"), ("the ", "onlooker"), ("the ", "witness"),
        ("a ", "door"), ("its ", "doors"), ("the ", "doors"), ("told ", "apart"), ("heard ", "of"), ("gone ", "for"),
        ("what is ", "said"), ("is ", "said"), ("are ", "said"), ("was ", "said"),
    )
)  # fmt: skip
_PHRASE = re.compile(r"(?<!\w)(?:" + "|".join(re.escape(phrase) for phrase in PHRASES) + r")(?!\w)", re.IGNORECASE)
# References that no reader can open: numbers of a checklist and names of internal documents.
_SOURCE = re.compile(r"(?<![\w-])(?:S(?!3\b)\d{1,3}|CHECK" + r"LIST(?:\.md)?|FEEL" + r"(?:\.md)?)(?![\w-])")


@cache
def old_names() -> frozenset[str]:
    """Return the names of 0.1's modules, classes and functions that are gone."""
    return frozenset(line for line in OLD_NAMES.read_text(encoding="utf-8").split() if line)


def old_identifiers(path: Path, text: str) -> Iterator[str]:
    """No identifier has a name that the glossary replaced."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in old_names():
            yield f"{path}:{token.start[0]}: {token.string} is a name of 0.1; see docs/upgrading.md for the new one"


def phrases(path: Path, text: str) -> Iterator[str]:
    """No text uses a phrase of the old dialect, over line breaks as well. In Python: comments and strings."""
    prose = _prose(text) if path.suffix == ".py" else text
    for match in _PHRASE.finditer(re.sub(r"[\s#]+", " ", prose)):
        yield f"{path}: {match.group(0)!r} is dialect; docs/contributing/style.md has the field's words"


def sources(path: Path, text: str) -> Iterator[str]:
    """No text cites a number or a document that a reader cannot open."""
    for number, line in enumerate(text.splitlines(), 1):
        if "noqa" in line or path.name == "pyproject.toml":
            continue  # ruff's rules have such numbers as well
        for match in _SOURCE.finditer(line):
            yield f"{path}:{number}: {match.group(0)} is no source; cite the document, or docs/decisions.md"


def _prose(text: str) -> str:
    """Return comments and strings of a Python file, one after the other."""
    return " ".join(
        token.string.strip("rbfRBF\"'")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in {tokenize.COMMENT, tokenize.STRING}
    )


def duplicate_modules(modules: Collection[str]) -> Iterator[str]:
    """Within `core`, `sim` and `runtime` a module name stands once. `modules`: dotted names."""
    for package in UNIQUE_WITHIN:
        named = defaultdict(list)
        for module in modules:
            parts = module.split(".")
            if parts[:2] == ["gpu_autoscaler", package] and parts[-1] != "__init__":
                named[parts[-1]].append(module)
        for name, found in sorted(named.items()):
            if len(found) > 1:
                yield f"module name {name} stands {len(found)} times in {package}: {', '.join(sorted(found))}"


def small_modules(lines: Mapping[str, int], importers: Mapping[str, Collection[str]]) -> Iterator[str]:
    """No module under 60 lines has a single importer. `lines`: by module; `importers`: of each module."""
    for module, count in sorted(lines.items()):
        users = importers.get(module, ())
        if count < SMALL_MODULE_LINES and len(users) == 1:
            yield f"{module} has {count} lines and one importer, {next(iter(users))}; fold it in"


def imports_of(text: str, modules: Collection[str]) -> set[str]:
    """Return the modules that a file imports, of those named."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & set(modules)


def test_file_name(path: Path, modules: Collection[str]) -> Iterator[str]:
    """A test file begins with the name of the module it tests. `modules`: stems that its folder may test."""
    stem = path.stem.removeprefix("test_")
    if not any(stem == module or stem.startswith(f"{module}_") for module in modules):
        yield f"{path}: no module {stem} in its package; name the file after the module it tests"
