"""Every planted bug can be planted: its text exists."""

from pathlib import Path

import pytest
from tests.sim.hunting import ROOT, UNCHECKED, plant
from tests.sim.planted import PLANTED
from tests.sim.planted_effects import SHOWN_BY_TESTS
from tests.sim.planted_tested import TESTED
from tests.sim.planting import Planted


@pytest.mark.parametrize(
    "bug", [*PLANTED, *(shown.bug for shown in SHOWN_BY_TESTS), *TESTED.values(), UNCHECKED], ids=lambda bug: bug.name
)
def test_the_text_of_a_planted_bug_occurs_once(bug: Planted, tmp_path: Path) -> None:
    """The text occurs exactly once; when the code moves, the bug must be planted anew."""
    names = [name for name, _, _ in bug.changes()]
    for name in names:
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    plant(bug, tmp_path)
    for name in names:
        compile((tmp_path / name).read_text(encoding="utf-8"), name, "exec")
