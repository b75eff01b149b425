"""Streams of the soak discard during the run, and can still be repeated before they do."""

import pytest
from tests.soak.retention import SHORTER, limits_of, shortened

from gpu_autoscaler.bus.streams import STREAMS


@pytest.mark.parametrize("minutes", [10.0, 60.0])
def test_every_stream_discards_during_the_run(minutes: float) -> None:
    """Each age is at most a hundredth of the declared one or five minutes, and shorter than the run."""
    limits = limits_of(minutes)
    for spec in STREAMS:
        age = limits[spec.name].max_age_seconds
        assert age <= max(300, spec.max_age_seconds // SHORTER)
        assert age < minutes * 60


@pytest.mark.parametrize("minutes", [3.0, 10.0, 60.0])
def test_ids_are_forgotten_before_anything_is_repeated(minutes: float) -> None:
    """A repeat at half the age within the window would be dropped as a duplicate, and its object lost."""
    for spec in shortened(minutes):
        assert spec.duplicate_window_seconds < spec.max_age_seconds / 2
