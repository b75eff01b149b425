"""What `make test` leaves to `make sweep`: the further cases of a claim that one case represents."""

import pytest


def represented(*cases: object) -> list[object]:
    """Return the cases for `parametrize`: the first runs in every test run, the others in `make sweep`."""
    first, *others = cases
    return [first, *(pytest.param(*_values(case), marks=pytest.mark.sweep) for case in others)]


def _values(case: object) -> tuple[object, ...]:
    return case if isinstance(case, tuple) else (case,)
