"""What a swarm is there for comes up: reasons and faults of every kind; the report names what did not."""

from io import StringIO

import pytest
from rich.console import Console

from gpu_autoscaler.sim.faults.injection import KINDS
from gpu_autoscaler.sim.invariants.reason_coverage import RARE_REASONS
from gpu_autoscaler.sim.simulation import Setting
from gpu_autoscaler.sim.sweep import print_summary, reason_tags, summarize
from gpu_autoscaler_services.simulate import run_one


@pytest.mark.parametrize(
    ("kind", "reason", "seed", "hours", "times"),
    [
        ("operator_freezes", "frozen", 8, 1.0, 10.0),
        ("operator_marks_node", "node_protected", 7, 2.0, 1.0),
        # Often, as one freeze may fall into a time in which a limit holds everything back already.
        ("operator_overrules", "frozen", 1, 1.0, 10.0),
        ("operator_lowers_money", "spend_exhausted", 1, 1.0, 4.0),
        ("operator_lowers_money", "spend_enforcement_blocked", 1, 1.0, 4.0),
        ("capacity_gone", "offers_unavailable", 14, 1.0, 1.0),
        ("price_missing", "price_unknown", 3, 2.0, 1.0),
        ("worn_gpu", "node_unhealthy", 3, 2.0, 1.0),
        ("telemetry_silent", "telemetry_unreliable", 3, 2.0, 1.0),
    ],
)
def test_a_fault_brings_its_reason(kind: str, reason: str, seed: int, hours: float, times: float) -> None:
    """With this kind alone, so many times as often as usual, plans say this reason, and every promise is kept."""
    result = run_one(Setting(seed=seed, hours=hours, kinds=(kind,), faults_times=times))
    assert result.broken == ()
    assert set(result.faults) == {kind}
    assert result.reasons.get(reason)


def test_what_was_never_reached_is_named() -> None:
    """A short calm run reaches little, and says so of everything else."""
    setting = Setting(seed=1, hours=0.2, kinds=())
    result = run_one(setting)
    summary = summarize([(setting, result)], run_one, commit="none")
    assert set(summary.faults_never_struck) == set(KINDS)
    assert set(summary.reasons_never_given) == set(reason_tags()) - set(result.reasons)
    assert "node_orphaned" in summary.reasons_never_given
    description = StringIO()
    print_summary(summary, Console(file=description, width=4000))
    assert f"spend_enforcement_blocked ({RARE_REASONS['spend_enforcement_blocked']})" in description.getvalue()


def test_only_reasons_that_there_are_are_called_seldom() -> None:
    """Else a reason that was renamed would be told without its why."""
    assert set(RARE_REASONS) <= set(reason_tags())


def test_a_large_world_that_foresees_demand_says_that_it_is_not_sure_yet() -> None:
    """Its record has a day before, of which a forecast is made that nothing has scored."""
    result = run_one(Setting(seed=9, hours=0.6, ends_at_hours=0.6, kinds=(), is_large=True))
    assert result.broken == ()
    assert result.reasons.get("forecast_uncertain")
