"""Checkpoint annotations of pods; an invalid one is no save."""

import pytest
from tests.support.stories import MINUTE, SECOND, T0

from gpu_autoscaler.core.disruption.protection import can_save, checkpointed_at, has_answered
from gpu_autoscaler.model import labels


def said(value: str) -> dict[str, str]:
    """The annotation, as a pod carries it."""
    return {labels.CHECKPOINTED_AT: value}


def test_a_pod_without_the_annotation_does_not_save() -> None:
    """With an empty one it can save and has not yet."""
    assert not can_save({})
    assert can_save(said(""))
    assert checkpointed_at(said("")) is None
    assert not has_answered(said(""), T0)


def test_an_answer_is_a_save_since_the_request() -> None:
    """An older save does not count; one of just before does, and an instant without zone is UTC."""
    assert not has_answered(said((T0 - MINUTE).isoformat()), T0)
    assert has_answered(said((T0 - SECOND).isoformat()), T0)
    assert has_answered(said((T0 + MINUTE).isoformat().replace("+00:00", "Z")), T0)
    assert has_answered(said((T0 + MINUTE).replace(tzinfo=None).isoformat()), T0)


@pytest.mark.parametrize("value", ["yes", "1732190400", "2026-13-01T00:00:00Z"])
def test_an_invalid_instant_is_no_save(value: str) -> None:
    """It neither fails nor answers."""
    assert checkpointed_at(said(value)) is None
    assert not has_answered(said(value), T0)
