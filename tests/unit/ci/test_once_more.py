"""What CI tries a second time, and what it does not."""

import pytest
from tests.support.once_more import tried_again

WAITED = "tests/e2e/test_story.py::test_all"


@pytest.mark.parametrize(
    "failed", [[], [f"tests/e2e/test_{index}.py::test_all" for index in range(5)]], ids=["nothing", "too many files"]
)
def test_fails_at_once(failed: list[str]) -> None:
    """Many failures are no accident."""
    assert tried_again(failed) == []


def test_few_are_tried_again() -> None:
    """With those that found what the first left open, and all that lost one server."""
    assert tried_again([WAITED, "tests/unit/core/test_plan.py::test_one"])
    assert tried_again([f"{WAITED}[{index}]" for index in range(20)])
