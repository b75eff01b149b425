"""A local system that starts again goes on in the time of its record."""

from pathlib import Path

import pytest

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.local.system import CLOCK_FILE, load_clock


def test_time_goes_on_where_a_record_is(tmp_path: Path) -> None:
    """The same origin, so that no fact of the last run lies in the future; a folder without a record begins now."""
    first = load_clock(tmp_path / "new", 10.0)
    (tmp_path / CLOCK_FILE).write_text(first.to_text(), encoding="utf-8")

    again = load_clock(tmp_path, 10.0)

    assert (again.factor, again.origin) == (10.0, first.origin)


@pytest.mark.parametrize(("kept", "words"), [("10.0@2026-11-21T12:00:00+00:00", "--clock-factor 10"), ("ten", "'ten'")])
def test_a_record_of_another_pace_is_not_gone_on_with(tmp_path: Path, kept: str, words: str) -> None:
    """Stamps of the broker would mean other instants than they did; the error says what to do."""
    (tmp_path / CLOCK_FILE).write_text(kept, encoding="utf-8")

    with pytest.raises(ConfigError, match=words):
        load_clock(tmp_path, Clock().factor)
