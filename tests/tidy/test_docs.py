"""What the design notes name is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = (ROOT, ROOT / "libs" / "gpu_autoscaler", ROOT / "services" / "gpu_autoscaler_services")

# `core/plan.py: plan(state)` names something in a file; `core/plan.py` and `kube/translate/` are places.
# A bare file name without either says what such a file is called, anywhere.
NAMED = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|md|toml|yml)|(?:[\w-]+/)+)(?:: (\w+)[^`]*)?`")


def missing(text: str) -> list[str]:
    """Return what the text names and nobody finds."""
    found = []
    for path, name in NAMED.findall(text):
        if "/" not in path and not name:
            continue
        there = next((place / path for place in PLACES if (place / path).exists()), None)
        if there is None:
            found.append(path)
        elif name and name not in _defined(there):
            found.append(f"{path}: {name}")
    return found


def _defined(path: Path) -> set[str]:
    names = set()
    for item in ast.parse(path.read_text(encoding="utf-8")).body:
        match item:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
    return names


@pytest.mark.parametrize(
    "document",
    [
        "docs/DESIGN.md",
        "docs/architecture/walks.md",
        "docs/operations.md",
        "docs/replay.md",
        "docs/simulation.md",
        "docs/testing.md",
        "CONTRIBUTING.md",
    ],
)
def test_what_the_notes_name_is_there(document: str) -> None:
    """Every file, and every function or class that is named with its file."""
    assert missing((ROOT / document).read_text(encoding="utf-8")) == []


def test_a_name_that_is_gone_is_found() -> None:
    """The rule sees a wrong file, a wrong folder and a wrong name in a file that is there."""
    text = "`core/plan.py: plan(state)` `core/plan.py: draw` `core/none.py` `core/none/` `core/`"
    assert missing(text) == ["core/plan.py: draw", "core/none.py", "core/none/"]
