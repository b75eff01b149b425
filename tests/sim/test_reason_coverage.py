"""A sweep reaches reasons and faults of every kind; the report names those it did not reach."""

from io import StringIO

import pytest
from rich.console import Console
from tests.support.sweeping import represented

from gpu_autoscaler.sim.faults.injection import KINDS
from gpu_autoscaler.sim.invariants.reason_coverage import RARE_REASONS
from gpu_autoscaler.sim.simulation import Setting
from gpu_autoscaler.sim.sweep import print_summary, reason_tags, summarize
from gpu_autoscaler_services.simulate import run_one


@pytest.mark.parametrize(
    ("kind", "reason", "seed", "hours", "times"),
    represented(
        ("quota_zero", "offers_unavailable", 18, 0.5, 8.0),
        ("operator_freezes", "frozen", 8, 1.0, 10.0),
        ("operator_marks_node", "node_protected", 7, 2.0, 1.0),
        # Frequent, as one freeze may coincide with a limit that defers everything.
        ("operator_overrules", "frozen", 1, 1.0, 10.0),
        ("operator_lowers_money", "spend_exhausted", 1, 1.0, 4.0),
        ("operator_lowers_money", "spend_enforcement_blocked", 1, 1.0, 4.0),
        ("capacity_gone", "offers_unavailable", 14, 1.0, 1.0),
        ("price_missing", "price_unknown", 3, 2.0, 1.0),
        ("worn_gpu", "node_unhealthy", 3, 2.0, 1.0),
        ("telemetry_silent", "telemetry_unreliable", 3, 2.0, 1.0),
    ),
)
def test_a_fault_causes_its_reason(kind: str, reason: str, seed: int, hours: float, times: float) -> None:
    """With only this kind, at a higher frequency, plans give this reason, and nothing is violated."""
    result = run_one(Setting(seed=seed, hours=hours, kinds=(kind,), faults_times=times))
    assert result.violations == ()
    assert set(result.faults) == {kind}
    assert result.reasons.get(reason)


def test_unreached_reasons_are_reported() -> None:
    """A short calm run reaches little, and the report names the rest."""
    setting = Setting(seed=1, hours=0.2, kinds=())
    result = run_one(setting)
    summary = summarize([(setting, result)], run_one, commit="none")
    assert set(summary.faults_never_struck) == set(KINDS)
    assert set(summary.reasons_never_given) == set(reason_tags()) - set(result.reasons)
    assert "node_orphaned" in summary.reasons_never_given
    output = StringIO()
    print_summary(summary, Console(file=output, width=4000))
    assert f"spend_enforcement_blocked ({RARE_REASONS['spend_enforcement_blocked']})" in output.getvalue()


def test_rare_reasons_exist() -> None:
    """Otherwise a renamed reason would be reported without its explanation."""
    assert set(RARE_REASONS) <= set(reason_tags())


def test_a_large_cluster_with_a_forecast_reports_its_uncertainty() -> None:
    """It has the demand of a day before, so that a forecast exists that nothing has scored."""
    result = run_one(Setting(seed=9, hours=0.6, ends_at_hours=0.6, kinds=(), is_large=True))
    assert result.violations == ()
    assert result.reasons.get("forecast_uncertain")
