"""All metric names that existing dashboards use are exported unchanged (docs/decisions.md#metric-names)."""

import math

import pytest

from gpu_autoscaler.core.limits.spend import SpendUse
from gpu_autoscaler.core.provisioning.forecast_gauges import NO_FORECAST, ForecastGauges
from gpu_autoscaler.runtime.metric_families import BY_NAME, SPEND_BUDGETS_COUNT_MAX
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


def active(service: str) -> Metrics:
    """Return the metrics of the active process of a service, after its first tick."""
    metrics = Metrics(service)
    metrics.is_leading = metrics.has_ticked = lambda: True
    return metrics


def exported(metrics: Metrics) -> set[str]:
    """Return the families on `/metrics`."""
    return {family.name for family in metrics.registry.collect()}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_boards_know_is_exported(name: str) -> None:
    """Labels for direction and capacity type where dashboards use them; an unknown value is exported as NaN."""
    owner = {"dcgm_up": "dcgm_ingest", "gpu_autoscaler_spot_interruptions_total": "spot_watcher"}.get(name, "scaler")
    metrics = active(owner)
    metrics.scaling_duration.labels("up").observe(1)
    samples = [sample for family in metrics.registry.collect() for sample in family.samples if sample.name == name]
    assert samples
    if "scaling_" in name:
        assert all("direction" in sample.labels for sample in samples)
    if name.endswith(("_nodes", "monthly_cost_usd")) and "underutilized" not in name:
        assert all(set(sample.labels) == {"capacity_type"} for sample in samples)


def test_the_forecasts_two_figures_are_shown_and_unknown_is_no_number() -> None:
    """NaN only where there is none."""
    metrics = active("scaler")
    names = ("gpu_autoscaler_predicted_utilization", "gpu_autoscaler_prediction_confidence")

    def shown() -> list[float]:
        return [metrics.registry.get_sample_value(name) or 0.0 for name in names]

    metrics.set_forecast(ForecastGauges(utilization_ratio=1.25, confidence_ratio=0.8))
    assert shown() == [1.25, 0.8]
    metrics.set_forecast(NO_FORECAST)
    assert all(map(math.isnan, shown()))


def test_a_process_exports_only_what_its_service_owns() -> None:
    """A gateway has no fleet, no plans and no lease; the notices of one node come from the role that reads them."""
    assert {"gpu_autoscaler_ready", "gpu_autoscaler_facts_folded"} <= exported(active("gateway"))
    for name in ("leader", "nodes", "plans_refused", "deferred", "cost_micro_usd", "facts_handled"):
        assert f"gpu_autoscaler_{name}" not in exported(active("gateway")), name
    unreachable = "gpu_autoscaler_metadata_unreachable_nodes"
    assert unreachable in exported(Metrics("spot_watcher", role="node"))
    assert unreachable not in exported(Metrics("spot_watcher", role="central"))


def test_the_fleet_is_exported_by_the_active_process_after_its_first_tick() -> None:
    """A standby exports its counters and no fleet; before the first tick there are no false zeros."""
    metrics = Metrics("scaler")
    standby = exported(metrics)
    assert {"gpu_autoscaler_leader", "gpu_autoscaler_plans_refused"} <= standby
    metrics.is_leading = lambda: True
    leading = exported(metrics)
    assert "gpu_autoscaler_plan_age_seconds" in leading - standby
    assert "gpu_autoscaler_nodes" not in leading
    metrics.has_ticked = lambda: True
    assert "gpu_autoscaler_nodes" in exported(metrics) - leading
    metrics.is_leading = lambda: False
    assert exported(metrics) == standby


def test_a_lost_lease_leaves_no_values_for_the_next_term() -> None:
    """What the last plan deferred, forecast and spent belongs to the process that is active now."""
    metrics = active("scaler")
    metrics.set_deferred({"frozen": 3})
    metrics.set_spend(lambda: (SpendUse("cluster", "day", 0.5),))
    metrics.set_forecast(ForecastGauges(utilization_ratio=1.25, confidence_ratio=0.8))
    metrics.stream_fill.labels("JOB").set(0.9)
    metrics.forget_term()
    metrics.update_spend()
    value = metrics.registry.get_sample_value
    assert value("gpu_autoscaler_deferred", {"reason": "frozen"}) == 0
    assert value("gpu_autoscaler_spend_budget_used_ratio", {"budget": "cluster", "period": "day"}) is None
    assert value("gpu_autoscaler_stream_fill_ratio", {"stream": "JOB"}) is None
    assert math.isnan(value("gpu_autoscaler_predicted_utilization") or 0.0)


def test_refused_launches_are_counted_by_a_bounded_set_of_codes() -> None:
    """A code that no driver knows is `other`."""
    metrics = active("scaler")
    for code in ("InsufficientInstanceCapacity", "SomethingNew-1", "SomethingNew-2"):
        metrics.count_refused_launch(code)

    def count(code: str) -> float | None:
        labels = {"outcome": "refused", "code": code}
        return metrics.registry.get_sample_value("gpu_autoscaler_launches_total", labels)

    assert (count("InsufficientInstanceCapacity"), count("other"), count("SomethingNew-1")) == (1, 2, None)


def test_spend_budgets_are_exported_up_to_a_limit() -> None:
    """The most used ones by name, the largest of the others as `other`; unknown is NaN, a removed one is gone."""
    metrics = active("scaler")
    uses = [SpendUse(f"pool/{number}", "day", number / 100) for number in range(SPEND_BUDGETS_COUNT_MAX + 10)]

    def used(budget: str) -> float | None:
        labels = {"budget": budget, "period": "day"}
        return metrics.registry.get_sample_value("gpu_autoscaler_spend_budget_used_ratio", labels)

    metrics.set_spend(lambda: uses)
    metrics.update_spend()
    assert (used("pool/59"), used("pool/10"), used("pool/9"), used("other")) == (0.59, 0.1, None, 0.09)
    metrics.set_spend(lambda: (SpendUse("cluster", "day", None),))
    metrics.update_spend()
    assert math.isnan(used("cluster") or 0.0)
    assert used("pool/59") is None


def test_labels_of_the_table_are_those_of_the_metrics() -> None:
    """Names are unique, and every family of the table has a metric."""
    metrics = Metrics("t")
    made = {metric._name for metric in vars(metrics).values() if hasattr(metric, "_name")}
    assert made == {family.full_name for family in BY_NAME.values()}
