"""docs/rights.md has the rights and roles of the code."""

from pathlib import Path

from gpu_autoscaler_services.api_rights import RIGHTS, ROLES, ApiRight

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rights.md"


def test_the_page_of_rights_has_a_row_for_each_right() -> None:
    """With a cell for each role, in the order of the code."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and "` | the " in line]
    assert rows == [_row(right) for right in RIGHTS]


def _row(right: ApiRight) -> str:
    place = "the project" if right.is_by_project else "the release"
    cells = ("yes" if right in rights else "" for rights in ROLES.values())
    return f"| {right.meaning} | `{right.verb} {right.resource}` | {place} | {' | '.join(cells)} |"
