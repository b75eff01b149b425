"""What CI tries a second time, and what it does not."""

import pytest
from tests.support.once_more import tried_again

WAITED = "tests/e2e/test_story.py::test_all"


@pytest.mark.parametrize(
    "failed",
    [
        [],
        ["tests/unit/core/test_plan.py::test_one"],
        ["tests/sim/test_swarm.py::test_seed[3]"],
        [WAITED, "tests/unit/core/test_plan.py::test_one"],
        [f"{WAITED}[{index}]" for index in range(4)],
    ],
    ids=["nothing failed", "arithmetic", "the simulator", "one of both", "too many"],
)
def test_fails_at_once(failed: list[str]) -> None:
    """Arithmetic fails the same way again, and many failures are no accident."""
    assert tried_again(failed) == []


def test_few_that_waited_for_processes_are_tried_again() -> None:
    """All of them, or none."""
    assert tried_again([WAITED, "tests/integration/kube/test_policies.py::test_one"])
