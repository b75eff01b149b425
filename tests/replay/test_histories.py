"""The current code decides as recorded, except for blessed changes of decisions."""

import difflib

import msgspec
import pytest
from tests.replay.histories_data import DAYS, expected_of, history_of, replayed, report_of

from gpu_autoscaler.replay.recording import load
from gpu_autoscaler.replay.retrace import retrace

BYTES_MAX = 400_000  # of all histories together


@pytest.mark.parametrize("name", DAYS)
def test_decisions_equal_the_recorded_ones(name: str) -> None:
    """At each recorded plan and at each tick in between, every difference is blessed."""
    expected, actual = expected_of(name).read_text(encoding="utf-8"), report_of(replayed(name))

    changed = "\n".join(
        difflib.unified_diff(expected.splitlines(), actual.splitlines(), "expected", "actual", lineterm="")
    )
    hint = f"decisions of the recorded day {name!r} changed; if intended: python -m tests.replay bless"
    assert actual == expected, f"{hint}\n{changed}"


def test_each_day_contains_what_its_name_says() -> None:
    """A history without decisions would prove nothing."""
    reasons = {name: _reasons(name) for name in DAYS}

    assert all("unmet_demand" in tags and "node_idle" in tags for tags in reasons.values())
    assert "spot_reclaim" in reasons["storm"]
    assert "spot_reclaim" not in reasons["quiet"]
    assert replayed("outage").silent_seconds > 200
    assert len(load(history_of("burst")).plans()) > 20


def test_another_threshold_shows_as_difference_with_both_reasons() -> None:
    """With half the idle time, a node is drained earlier, between two recorded plans."""
    recording = load(history_of("quiet"))
    policy = recording.head.policy
    sooner = msgspec.structs.replace(
        policy, idle_seconds_max=policy.idle_seconds_max / 2, scale_down_cooldown_seconds=0.0
    )

    result = retrace(recording, sooner)

    drains = [deviation for deviation in result.decisions if deviation.difference.other.what == "drain_node"]
    assert drains
    assert all(deviation.difference.other.reason == "node_idle" for deviation in drains)
    assert any(deviation.difference.made.reason in ("not_yet_idle", "cooldown") for deviation in drains)
    assert result.other_policy_count == result.plans_count


def test_histories_stay_small() -> None:
    """They are part of every checkout."""
    assert sum(history_of(name).stat().st_size for name in DAYS) < BYTES_MAX


def _reasons(name: str) -> set[str]:
    return {
        decision.reason.tag()
        for stored in load(history_of(name)).plans()
        for decision in getattr(stored.recorded.fact, "plan").decisions  # noqa: B009 - a plan, as `plans` says
    }
