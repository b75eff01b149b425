"""The style guide holds (`docs/contributing/style.md`), and each rule is shown to fail on a bad example."""

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.tidy import language

ROOT = Path(__file__).resolve().parents[2]
# What quotes old words on purpose, is recorded data, or is another project's text.
EXEMPT = (
    "tests/tidy/language.py", "tests/tidy/test_language.py", "tests/tidy/old_names.txt", "docs/upgrading.md",
    "docs/contributing/style.md", "docs/mutants.md", "docs/scores.md", "tests/replay/histories/", "tests/upgrade/",
    "requirements/", "LICENSE", "CHANGELOG.md",
)  # fmt: skip
PROSE = {".py", ".md", ".toml", ".yaml", ".yml", ".js", ".html", ".css", ".tpl", ".txt", ".json"}


@cache
def _files() -> tuple[Path, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    names = (name for name in sorted(set(listed)) if not name.startswith(EXEMPT))
    return tuple(path for name in names if (path := ROOT / name).is_file())


def _texts() -> Iterator[tuple[Path, str]]:
    for path in _files():
        if path.suffix in PROSE or path.name in {"Makefile", "Dockerfile"}:
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def _python() -> Iterator[tuple[Path, str]]:
    return ((path, text) for path, text in _texts() if path.suffix == ".py")


@cache
def _modules() -> dict[str, str]:
    """The text of each module of the product, by dotted name."""
    found = {}
    for path, text in _python():
        if path.parts[0] in {"libs", "services"} and path.name != "__init__.py":
            found[".".join(path.with_suffix("").parts[1:])] = text
    return found


def test_no_name_of_the_old_dialect_is_used() -> None:
    """Modules, classes and functions have the names of docs/upgrading.md."""
    assert [finding for path, text in _python() for finding in language.old_identifiers(path, text)] == []


def test_no_text_uses_a_phrase_of_the_old_dialect() -> None:
    """Comments, docstrings, messages, documents, policy and page read as the field writes."""
    assert [finding for path, text in _texts() for finding in language.phrases(path, text)] == []


def test_every_source_can_be_opened() -> None:
    """No number of a checklist stands for a reason."""
    assert [finding for path, text in _texts() for finding in language.sources(path, text)] == []


def test_module_names_are_unique() -> None:
    """Within `core`, `sim` and `runtime` a name leads to one file."""
    assert list(language.duplicate_modules(tuple(_modules()))) == []


def test_no_fragment_has_a_single_importer() -> None:
    """Modules are cut by topic, not by length."""
    modules = _modules()
    importers: dict[str, set[str]] = defaultdict(set)
    for module, text in modules.items():
        for imported in language.imports_of(text, modules):
            importers[imported].add(module)
    # Modules that run as a process of their own, or are loaded by name, have another entry point.
    by_name = {name for text in modules.values() for name in re.findall(r'"(gpu_autoscaler[\w.]+)"', text)}
    lines = {
        module: text.count("\n") for module, text in modules.items() if module not in by_name and "__main__" not in text
    }
    assert list(language.small_modules(lines, importers)) == []


def _tested_modules(folder: Path) -> set[str]:
    """Names of modules that tests in this folder of `tests/unit` or `tests/services` may be about."""
    parts = folder.relative_to(ROOT / "tests").parts
    root = ROOT / ("services/gpu_autoscaler_services" if parts[0] == "services" else "libs/gpu_autoscaler")
    package = root.joinpath(*parts[1:])
    found = set()
    for path in package.rglob("*.py"):
        names = path.relative_to(package).with_suffix("").parts
        found |= {"_".join(names[first:]) for first in range(len(names))}
    return found | {path.parent.name for path in package.rglob("__init__.py")}


def test_test_files_are_named_after_what_they_test() -> None:
    """Whoever changes a module finds its tests by name."""
    found: list[str] = []
    for folder in ("core", "model", "events", "bus", "kube", "runtime", "providers", "dcgm", "cloudmeta", "replay"):
        for path in sorted((ROOT / "tests" / "unit" / folder).rglob("test_*.py")):
            found += language.test_file_name(path.relative_to(ROOT), _tested_modules(path.parent))
    for path in sorted((ROOT / "tests" / "services").rglob("test_*.py")):
        found += language.test_file_name(path.relative_to(ROOT), _tested_modules(path.parent))
    assert found == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (language.phrases, '"""A value that nobody' + ' knows."""\n'),
        (language.phrases, "x = 1  # what is" + " told\n"),
        (language.phrases, "# a request that cannot be" + "\n# meant\n"),
        (language.sources, "# asked for by S1" + "7\n"),
        (language.sources, "# CHECK" + "LIST, Decisions\n"),
        (language.old_identifiers, "from x import Wit" + "ness\n"),
    ],
)
def test_a_rule_of_language_finds_a_bad_example(rule: language.TextRule, text: str) -> None:
    """Each rule can fail."""
    assert list(rule(Path("bad.py"), text)) != []


def test_ordinary_words_stay_usable() -> None:
    """Held, past, paid, other and room are words like any other."""
    text = '"""The lock is held; the past is paid, and the other room has a bar."""\nis_held = past = True\n'
    assert list(language.phrases(Path("good.py"), text)) == []
    assert list(language.old_identifiers(Path("good.py"), text)) == []


def test_a_rule_of_structure_finds_a_bad_example() -> None:
    """Twin names, fragments and badly named tests are found."""
    twins = ("gpu_autoscaler.core.a.limits", "gpu_autoscaler.core.b.limits")
    assert len(list(language.duplicate_modules(twins))) == 1
    assert len(list(language.small_modules({"a.b": 12}, {"a.b": {"a.c"}}))) == 1
    assert list(language.small_modules({"a.b": 12}, {"a.b": {"a.c", "a.d"}})) == []
    assert len(list(language.test_file_name(Path("tests/test_week.py"), {"drift"}))) == 1
    assert list(language.test_file_name(Path("tests/test_drift_week.py"), {"drift"})) == []
