"""A local system that restarts continues the cluster time of its record."""

from pathlib import Path

import pytest

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.local.system import CLOCK_FILE, load_clock


def test_clock_continues_from_the_record(tmp_path: Path) -> None:
    """With the same origin, so that no recorded fact lies in the future; a new folder starts now."""
    first = load_clock(tmp_path / "new", 10.0)
    (tmp_path / CLOCK_FILE).write_text(first.to_text(), encoding="utf-8")

    again = load_clock(tmp_path, 10.0)

    assert (again.factor, again.origin) == (10.0, first.origin)


@pytest.mark.parametrize(("kept", "words"), [("10.0@2026-11-21T12:00:00+00:00", "--clock-factor 10"), ("ten", "'ten'")])
def test_clock_of_another_factor_is_refused(tmp_path: Path, kept: str, words: str) -> None:
    """The broker's timestamps would mean other instants; the error gives the next step."""
    (tmp_path / CLOCK_FILE).write_text(kept, encoding="utf-8")

    with pytest.raises(ConfigError, match=words):
        load_clock(tmp_path, Clock().factor)
