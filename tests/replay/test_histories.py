"""What was decided on a recorded day is decided today, except where a change of decisions was blessed."""

import difflib

import msgspec
import pytest
from tests.replay.histories_data import DAYS, expected_of, history_of, replayed, told_of

from gpu_autoscaler.replay.recording import load
from gpu_autoscaler.replay.retrace import retrace

BYTES_MAX = 400_000  # of all histories together


@pytest.mark.parametrize("name", DAYS)
def test_today_decides_what_was_decided(name: str) -> None:
    """Each kind of day, each recorded plan and each tick between: a difference is one that somebody has blessed."""
    expected, found = expected_of(name).read_text(encoding="utf-8"), told_of(replayed(name))

    changed = "\n".join(
        difflib.unified_diff(expected.splitlines(), found.splitlines(), "expected", "found", lineterm="")
    )
    told = f"decisions of the recorded day {name!r} changed; if on purpose: python -m tests.replay bless"
    assert found == expected, f"{told}\n{changed}"


def test_each_day_is_what_its_name_says() -> None:
    """A history in which nothing happens would hold nobody to anything."""
    reasons = {name: _reasons(name) for name in DAYS}

    assert all("unmet_demand" in found and "node_idle" in found for found in reasons.values())
    assert "spot_reclaim" in reasons["storm"]
    assert "spot_reclaim" not in reasons["quiet"]
    assert replayed("outage").silent_seconds > 200
    assert len(load(history_of("burst")).plans()) > 20


def test_another_threshold_is_seen_with_both_reasons() -> None:
    """A node that is allowed half the idle time goes sooner, between two recorded plans."""
    recording = load(history_of("quiet"))
    policy = recording.head.policy
    sooner = msgspec.structs.replace(
        policy, idle_seconds_max=policy.idle_seconds_max / 2, scale_down_cooldown_seconds=0.0
    )

    found = retrace(recording, sooner)

    drains = [one for one in found.decisions if one.difference.other.what == "drain_node"]
    assert drains
    assert all(one.difference.other.reason == "node_idle" for one in drains)
    assert any(one.difference.made.reason in ("not_yet_idle", "cooldown") for one in drains)
    assert found.other_policy_count == found.plans_count


def test_histories_stay_small() -> None:
    """They are part of every checkout."""
    assert sum(history_of(name).stat().st_size for name in DAYS) < BYTES_MAX


def _reasons(name: str) -> set[str]:
    return {
        decision.reason.tag()
        for each in load(history_of(name)).plans()
        for decision in getattr(each.recorded.fact, "plan").decisions  # noqa: B009 - a plan, as `plans` says
    }
