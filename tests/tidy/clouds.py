"""Test coverage of the cloud APIs: generate `docs/clouds.md` from the marks on the tests.

`@pytest.mark.cloud("aws", calls=(...), errors=(...), notices=(...))` on a test, on a class of tests, or in a module's
`pytestmark` names what it tests: calls and errors by the cloud's names, notices by ours.
`python -m tests.tidy.clouds` regenerates the page. The marks are read from the source, so no test dependency has to be
installed.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clouds.md"
KINDS = ("calls", "errors", "notices")
TITLES = {"aws": "Amazon Web Services", "azure": "Azure", "gcp": "Google Cloud", "karpenter": "Karpenter"}
HEAD = """# Cloud API test coverage

The cloud API calls that the drivers make, the errors that they recognize and the interruption notices that they read,
each with the tests that cover it. The tests run against simulated cloud servers, not against the clouds themselves.

This page is generated from the marks on the tests by `python -m tests.tidy.clouds`; a test fails if it is out of date.
A test whose mark names a call that no simulated server received fails (`tests/support/claims.py`). Errors and notices
are declared by the tests and not checked this way.
"""

Coverage = dict[tuple[str, str, str], list[str]]  # (cloud, kind, name) -> tests


def read_coverage(folder: Path = ROOT / "tests") -> Coverage:
    """Return the tests by cloud, kind and name, in the order of their paths."""
    coverage: Coverage = {}
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "pytest.mark.cloud" not in text:
            continue
        tree = ast.parse(text)
        for test, mark in _marks(tree, path.relative_to(ROOT).as_posix()):
            cloud = ast.literal_eval(mark.args[0])
            for keyword in mark.keywords:
                if keyword.arg not in KINDS:
                    raise ValueError(f"{test}: {keyword.arg} is not one of {', '.join(KINDS)}")
                for name in _names(tree, keyword.value):
                    coverage.setdefault((cloud, keyword.arg, name), []).append(test)
    return coverage


def render_page(coverage: Mapping[tuple[str, str, str], list[str]]) -> str:
    """Return the whole page."""
    parts = [HEAD]
    for cloud in sorted({cloud for cloud, _, _ in coverage}):
        parts.append(f"## {TITLES[cloud]}\n")
        for kind in KINDS:
            rows = sorted((key[2], set(tests)) for key, tests in coverage.items() if key[:2] == (cloud, kind))
            if rows:
                parts.append(f"| {kind[:-1]} | covered by |\n| --- | --- |")
                parts += [f"| {name} | {', '.join(map(_link, sorted(tests)))} |" for name, tests in rows]
                parts.append("")
    return "\n".join(parts)


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    title = name or Path(path).stem
    return f"[{title.removeprefix('test_').replace('_', ' ')}](../{path})"


def _marks(tree: ast.Module, path: str) -> Iterator[tuple[str, ast.Call]]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                marks = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
                yield from ((path, mark) for mark in _cloud_marks(marks))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from ((f"{path}::{node.name}", mark) for mark in _cloud_marks(node.decorator_list))
            case ast.ClassDef():
                yield from ((f"{path}::{node.name}", mark) for mark in _cloud_marks(node.decorator_list))
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield from ((f"{path}::{inner.name}", mark) for mark in _cloud_marks(inner.decorator_list))


def _names(tree: ast.Module, value: ast.expr) -> Iterable[str]:
    """Return the names given literally or by a constant of the module; for a mapping, its keys."""
    constants = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    names: Iterable[str] = ast.literal_eval(constants.get(ast.unparse(value), value))
    return names


def _cloud_marks(marks: list[ast.expr]) -> Iterator[ast.Call]:
    for mark in marks:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.cloud":
            yield mark


if __name__ == "__main__":
    PAGE.write_text(render_page(read_coverage()), encoding="utf-8")
