"""All metric names that existing dashboards use are exported unchanged (docs/decisions.md#metric-names)."""

import math

import pytest

from gpu_autoscaler.core.provisioning.forecast_step import NO_FORECAST, ForecastGauges
from gpu_autoscaler.runtime.metrics import Metrics

# DCGM_* come from the exporters, `up` and `kube_*` from Prometheus and kube-state-metrics.
NAMES = (
    *(f"gpu_autoscaler_{name}" for name in (
        "scaling_actions_total", "scaling_duration_seconds_bucket", "nodes", "node_count", "desired_node_count",
        "cluster_utilization", "pending_pods", "underutilized_nodes", "spot_interruptions_total",
        "spot_termination_warnings", "spot_savings_percentage", "estimated_monthly_cost_usd",
        "estimated_monthly_savings_usd", "predicted_utilization", "prediction_confidence",
        "scale_up_cooldown_remaining_seconds", "scale_down_cooldown_remaining_seconds", "reconcile_errors_total",
    )),
    "controller_reconcile_errors", "controller_reconcile_duration", "dcgm_up",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_boards_know_is_exported(name: str) -> None:
    """Labels for direction and capacity type where dashboards use them; an unknown value is exported as NaN."""
    metrics = Metrics("scaler")
    metrics.scaling_duration.labels("up").observe(1)
    samples = [sample for family in metrics.registry.collect() for sample in family.samples if sample.name == name]
    assert samples
    if "scaling_" in name:
        assert all("direction" in sample.labels for sample in samples)
    if name.endswith(("_nodes", "monthly_cost_usd")) and "underutilized" not in name:
        assert all(set(sample.labels) == {"capacity_type"} for sample in samples)


def test_the_forecasts_two_figures_are_shown_and_unknown_is_no_number() -> None:
    """NaN only where there is none."""
    metrics = Metrics("scaler")
    names = ("gpu_autoscaler_predicted_utilization", "gpu_autoscaler_prediction_confidence")

    def shown() -> list[float]:
        return [metrics.registry.get_sample_value(name) or 0.0 for name in names]

    metrics.set_forecast(ForecastGauges(utilization_ratio=1.25, confidence_ratio=0.8))
    assert shown() == [1.25, 0.8]
    metrics.set_forecast(NO_FORECAST)
    assert all(map(math.isnan, shown()))
