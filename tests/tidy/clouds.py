"""What is shown of each cloud, and by which test: `docs/clouds.md`, made from the marks on the tests.

`@pytest.mark.cloud("aws", calls=(...), errors=(...), notices=(...))` on a test, on a class of tests, or in a module's
`pytestmark` says what of a cloud it shows: calls and errors in the cloud's own words, notices in ours.
`python -m tests.tidy.clouds` writes the table again. Read from the source, so that nothing has to be installed for it.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clouds.md"
KINDS = ("calls", "errors", "notices")
TITLES = {"aws": "Amazon Web Services", "azure": "Azure", "gcp": "Google Cloud", "karpenter": "Karpenter"}
HEAD = """# What is shown of each cloud

Every call that a driver makes, every error that it knows and every notice that is read, with the tests that show it
against servers that lie like the real ones. Made by `python -m tests.tidy.clouds` from the marks on the tests; a test
holds it against them. A mark with a call that the fakes were not asked for fails its test (`tests/support/claims.py`);
errors and notices are what each test says of itself.
"""

Shown = dict[tuple[str, str, str], list[str]]  # cloud, kind, name: tests


def shown(folder: Path = ROOT / "tests") -> Shown:
    """Return what the marks say, tests in the order of their paths."""
    found: Shown = {}
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for where, mark in _marks(tree, path.relative_to(ROOT).as_posix()):
            cloud = ast.literal_eval(mark.args[0])
            for keyword in mark.keywords:
                if keyword.arg not in KINDS:
                    raise ValueError(f"{where}: {keyword.arg} is none of {', '.join(KINDS)}")
                for name in _named(tree, keyword.value):
                    found.setdefault((cloud, keyword.arg, name), []).append(where)
    return found


def page(found: Mapping[tuple[str, str, str], list[str]]) -> str:
    """Return the whole page."""
    parts = [HEAD]
    for cloud in sorted({cloud for cloud, _, _ in found}):
        parts.append(f"## {TITLES[cloud]}\n")
        for kind in KINDS:
            rows = sorted((name, set(tests)) for (of, its, name), tests in found.items() if (of, its) == (cloud, kind))
            if rows:
                parts.append(f"| {kind[:-1]} | shown by |\n| --- | --- |")
                parts += [f"| {name} | {', '.join(map(_link, sorted(tests)))} |" for name, tests in rows]
                parts.append("")
    return "\n".join(parts)


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    said = name or Path(path).stem
    return f"[{said.removeprefix('test_').replace('_', ' ')}](../{path})"


def _marks(tree: ast.Module, path: str) -> Iterator[tuple[str, ast.Call]]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                marks = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
                yield from ((path, mark) for mark in _of_clouds(marks))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from ((f"{path}::{node.name}", mark) for mark in _of_clouds(node.decorator_list))
            case ast.ClassDef():
                yield from ((f"{path}::{node.name}", mark) for mark in _of_clouds(node.decorator_list))
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield from ((f"{path}::{inner.name}", mark) for mark in _of_clouds(inner.decorator_list))


def _named(tree: ast.Module, value: ast.expr) -> Iterable[str]:
    """Return the names, written out or by the name of a constant of the module; of a table, its keys."""
    constants = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    names: Iterable[str] = ast.literal_eval(constants.get(ast.unparse(value), value))
    return names


def _of_clouds(marks: list[ast.expr]) -> Iterator[ast.Call]:
    for mark in marks:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.cloud":
            yield mark


if __name__ == "__main__":
    PAGE.write_text(page(shown()), encoding="utf-8")
