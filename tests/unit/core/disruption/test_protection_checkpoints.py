"""A pod that can save says when it did; what nobody can read is no save."""

import pytest
from tests.support.stories import MINUTE, SECOND, T0

from gpu_autoscaler.core.disruption.protection import can_save, checkpointed_at, has_answered
from gpu_autoscaler.model import labels


def said(value: str) -> dict[str, str]:
    """The annotation, as a pod carries it."""
    return {labels.CHECKPOINTED_AT: value}


def test_who_says_nothing_takes_no_part() -> None:
    """Without the annotation nobody waits for the pod; with an empty one it can save and has not yet."""
    assert not can_save({})
    assert can_save(said(""))
    assert checkpointed_at(said("")) is None
    assert not has_answered(said(""), T0)


def test_an_answer_is_a_save_since_the_request() -> None:
    """An older save is none; one of just before is, and so is one whose clock has no zone but UTC."""
    assert not has_answered(said((T0 - MINUTE).isoformat()), T0)
    assert has_answered(said((T0 - SECOND).isoformat()), T0)
    assert has_answered(said((T0 + MINUTE).isoformat().replace("+00:00", "Z")), T0)
    assert has_answered(said((T0 + MINUTE).replace(tzinfo=None).isoformat()), T0)


@pytest.mark.parametrize("value", ["yes", "1732190400", "2026-13-01T00:00:00Z"])
def test_what_nobody_can_read_is_no_save(value: str) -> None:
    """It neither fails nor answers."""
    assert checkpointed_at(said(value)) is None
    assert not has_answered(said(value), T0)
