"""When each alert of the chart fires and when it stays silent, as series of one sample a minute.

Values are in promtool's notation: `1x20` is a 1 and twenty more, `0+1x20` grows by 1 a minute, `_x20` is no sample.
Source: Prometheus documentation, "Unit testing for rules" (read 2026-11-23).
"""

from collections.abc import Mapping

import msgspec

Series = Mapping[str, str]  # metric with its own labels, as `name{pod="a"}` -> values


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Series with which an alert fires after `minutes`, and with which it does not."""

    fires: Series
    silent: tuple[Series, ...]
    labels: Mapping[str, str] = {}  # of the alert, besides namespace, release and severity
    minutes: int = 20


_UNKNOWN = " ".join(["NaN"] * 26)
_A, _B = 'pod="controller-a"', 'pod="controller-b"'


def _stream(name: str, *, fill: float, oldest_seconds: float, limit_seconds: float) -> Series:
    labels = f'{{{_A},stream="{name}"}}'
    return {
        f"gpu_autoscaler_stream_fill_ratio{labels}": f"{fill}x25",
        f"gpu_autoscaler_stream_oldest_age_seconds{labels}": f"{oldest_seconds}x25",
        f"gpu_autoscaler_stream_age_limit_seconds{labels}": f"{limit_seconds}x25",
    }


CASES: Mapping[str, Case] = {
    "GpuAutoscalerNoActiveScaler": Case(
        # Two standbys and a healthy gateway, which has no lease and is no leader.
        fires={
            f"gpu_autoscaler_leader{{{_A}}}": "1x5 0x20",
            f"gpu_autoscaler_leader{{{_B}}}": "0x25",
            'gpu_autoscaler_ready{pod="gateway"}': "1x25",
        },
        silent=(
            {f"gpu_autoscaler_leader{{{_A}}}": "1x10 0x15", f"gpu_autoscaler_leader{{{_B}}}": "0x10 1x15"},
            {f"gpu_autoscaler_leader{{{_A}}}": "1x25"},
        ),
    ),
    "GpuAutoscalerServiceNotReady": Case(
        fires={f"gpu_autoscaler_ready{{{_A}}}": "1x5 0x20"},
        silent=({f"gpu_autoscaler_ready{{{_A}}}": "1x16 0x3 1x5"},),
        labels={"pod": "controller-a"},
    ),
    "GpuAutoscalerPlanRejected": Case(
        fires={f"gpu_autoscaler_plans_refused_total{{{_A}}}": "0x15 1x10"},
        silent=({f"gpu_autoscaler_plans_refused_total{{{_A}}}": "3x25"},),
        labels={"pod": "controller-a"},
    ),
    "GpuAutoscalerDemandSetAside": Case(
        fires={f"gpu_autoscaler_set_aside{{{_A}}}": "0x10 2x15"},
        # A former leader does not export it any more.
        silent=({f"gpu_autoscaler_set_aside{{{_A}}}": "2x13 _x12"}, {f"gpu_autoscaler_set_aside{{{_A}}}": "0x25"}),
        labels={"pod": "controller-a"},
    ),
    "GpuAutoscalerBrakeTripped": Case(
        fires={f"gpu_autoscaler_brake_tripped{{{_A}}}": "0x10 1x15"},
        # Somebody resumes; a former leader does not export it any more.
        silent=(
            {f"gpu_autoscaler_brake_tripped{{{_A}}}": "1x10 0x15"},
            {f"gpu_autoscaler_brake_tripped{{{_A}}}": "1x10 _x15"},
        ),
        labels={"pod": "controller-a"},
    ),
    "GpuAutoscalerPlansStale": Case(
        fires={
            f"gpu_autoscaler_plan_age_seconds{{{_A}}}": "0+60x25",
            f"gpu_autoscaler_plans_stale_total{{{_A}}}": "0+10x25",
        },
        silent=(
            # One of two scalers loses every race, the other one plans.
            {
                f"gpu_autoscaler_plan_age_seconds{{{_A}}}": "5x25",
                f"gpu_autoscaler_plans_stale_total{{{_B}}}": "0+10x25",
            },
            # No plan, and none was stale.
            {
                f"gpu_autoscaler_plan_age_seconds{{{_A}}}": "0+60x25",
                f"gpu_autoscaler_plans_stale_total{{{_A}}}": "7x25",
            },
        ),
        labels={"pod": "controller-a"},
    ),
    "GpuAutoscalerNotPlanning": Case(
        fires={f"gpu_autoscaler_plan_age_seconds{{{_A}}}": "0+60x25"},
        silent=({f"gpu_autoscaler_plan_age_seconds{{{_A}}}": "5x25"},),
        labels={"pod": "controller-a"},
    ),
    "GpuAutoscalerDrainsWaiting": Case(
        fires={f'gpu_autoscaler_effects_waiting{{{_A},lane="drains"}}': "0x15 4x10"},
        silent=(
            {f'gpu_autoscaler_effects_waiting{{{_A},lane="drains"}}': "0x19 4x6"},
            {f'gpu_autoscaler_effects_waiting{{{_A},lane="orders"}}': "400x25"},
        ),
        labels={"pod": "controller-a", "lane": "drains"},
    ),
    "GpuAutoscalerEffectsWaiting": Case(
        fires={f'gpu_autoscaler_effects_waiting{{{_A},lane="orders"}}': "0x2 80x23"},
        silent=(
            {f'gpu_autoscaler_effects_waiting{{{_A},lane="orders"}}': "0x10 80x3 0x2 80x10"},
            {f'gpu_autoscaler_effects_waiting{{{_A},lane="drains"}}': "4x25"},
        ),
        labels={"pod": "controller-a", "lane": "orders"},
    ),
    "GpuAutoscalerLaunchesRefused": Case(
        fires={
            f'gpu_autoscaler_launches_total{{{_A},outcome="refused",code="VcpuLimitExceeded"}}': "0+1x60",
            f'gpu_autoscaler_launches_total{{{_A},outcome="launched"}}': "5x60",
        },
        silent=(
            # Some offers are refused, others are not, by the same or by the next scaler.
            {
                f'gpu_autoscaler_launches_total{{{_A},outcome="refused",code="UnfulfillableCapacity"}}': "0+1x60",
                f'gpu_autoscaler_launches_total{{{_B},outcome="launched"}}': "0x30 1x30",
            },
            {f'gpu_autoscaler_launches_total{{{_A},outcome="refused",code="other"}}': "9x60"},
        ),
        minutes=50,
    ),
    "GpuAutoscalerSpendBudgetNearlyUsed": Case(
        fires={f'gpu_autoscaler_spend_budget_used_ratio{{{_A},budget="cluster",period="month"}}': "0.5+0.05x25"},
        silent=(
            {f'gpu_autoscaler_spend_budget_used_ratio{{{_A},budget="cluster",period="month"}}': "0.9x25"},
            {f'gpu_autoscaler_spend_budget_used_ratio{{{_A},budget="cluster",period="day"}}': _UNKNOWN},
        ),
        labels={"pod": "controller-a", "budget": "cluster", "period": "month"},
    ),
    "GpuAutoscalerStreamFull": Case(
        fires=_stream("GPU", fill=0.97, oldest_seconds=50_000, limit_seconds=86_400),
        silent=(
            # A large cluster whose stream is full and keeps what it should; a small one that has just begun.
            _stream("GPU", fill=0.97, oldest_seconds=86_000, limit_seconds=86_400),
            _stream("GPU", fill=0.5, oldest_seconds=50_000, limit_seconds=86_400),
        ),
        labels={"pod": "controller-a", "stream": "GPU"},
    ),
    "GpuAutoscalerStreamHistoryShort": Case(
        fires={
            f'gpu_autoscaler_stream_fill_ratio{{{_A},stream="GPU"}}': "0.99x25",
            f'gpu_autoscaler_stream_oldest_age_seconds{{{_A},stream="GPU"}}': "1440x25",
        },
        silent=(
            # A stream that was just created, and a full one that keeps two days.
            {
                f'gpu_autoscaler_stream_fill_ratio{{{_A},stream="GPU"}}': "0.1x25",
                f'gpu_autoscaler_stream_oldest_age_seconds{{{_A},stream="GPU"}}': "0+60x25",
            },
            {
                f'gpu_autoscaler_stream_fill_ratio{{{_A},stream="JOB"}}': "0.99x25",
                f'gpu_autoscaler_stream_oldest_age_seconds{{{_A},stream="JOB"}}': "172800x25",
                f'gpu_autoscaler_stream_oldest_age_seconds{{{_A},stream="COST"}}': "10x25",
            },
        ),
        labels={"pod": "controller-a", "stream": "GPU"},
    ),
    "GpuAutoscalerDeadLetters": Case(
        fires={'gpu_autoscaler_dead_letters_total{pod="gateway",domain="job",reason="invalid_fact"}': "0x15 1x10"},
        silent=(
            # Requests that their authors got wrong, one a minute.
            {'gpu_autoscaler_dead_letters_total{pod="scheduler",domain="job",reason="refused_request"}': "0+1x25"},
            {'gpu_autoscaler_dead_letters_total{pod="scheduler",domain="job",reason="bug"}': "2x25"},
        ),
        labels={"pod": "gateway", "domain": "job", "reason": "invalid_fact"},
    ),
    "GpuAutoscalerConsumerLag": Case(
        fires={'gpu_autoscaler_consumer_lag{pod="gateway",domain="gpu"}': "0x5 20000x20"},
        silent=({'gpu_autoscaler_consumer_lag{pod="gateway",domain="gpu"}': "20000x3 9000x20"},),
        labels={"pod": "gateway", "domain": "gpu"},
    ),
    "GpuAutoscalerBrokerUnreachable": Case(
        fires={'gpu_autoscaler_bus_connected{pod="gateway"}': "1x15 0x10"},
        silent=({'gpu_autoscaler_bus_connected{pod="gateway"}': "1x10 0x0 1x15"},),
        labels={"pod": "gateway"},
    ),
    "GpuAutoscalerPolicyInvalid": Case(
        fires={'gpu_autoscaler_policy_file_errors{pod="scheduler"}': "0x15 3x10"},
        silent=({'gpu_autoscaler_policy_file_errors{pod="scheduler"}': "0x25"},),
        labels={"pod": "scheduler"},
    ),
    "GpuAutoscalerTelemetryMissing": Case(
        fires={'dcgm_up{pod="dcgm-ingest"}': "1x5 0x20"},
        silent=({'dcgm_up{pod="dcgm-ingest"}': _UNKNOWN}, {'dcgm_up{pod="dcgm-ingest"}': "0x8 1x3 0x14"}),
        labels={"pod": "dcgm-ingest"},
    ),
    "GpuAutoscalerMetadataUnreachable": Case(
        fires={'gpu_autoscaler_metadata_unreachable_nodes{pod="notices-1"}': "0x10 1x15"},
        silent=({'gpu_autoscaler_metadata_unreachable_nodes{pod="notices-1"}': "0x17 1x8"},),
        labels={"pod": "notices-1"},
    ),
    "GpuAutoscalerQueueMessagesUnparsed": Case(
        fires={'gpu_autoscaler_unparsed_queue_messages_total{pod="spot-watcher"}': "0x5 1x20"},
        silent=({'gpu_autoscaler_unparsed_queue_messages_total{pod="spot-watcher"}': "4x25"},),
        labels={"pod": "spot-watcher"},
    ),
    "GpuAutoscalerListsStale": Case(
        fires={f'gpu_autoscaler_list_age_seconds{{{_A},source="pods"}}': "10x5 310+60x20"},
        silent=(
            # An outage of eight minutes, and a list that comes every two.
            {f'gpu_autoscaler_list_age_seconds{{{_A},source="nodes"}}': "10x5 60+60x7 10x15"},
            {f'gpu_autoscaler_list_age_seconds{{{_A},source="instances"}}': "120x25"},
        ),
        labels={"pod": "controller-a", "source": "pods"},
    ),
    "GpuAutoscalerPriceStale": Case(
        fires={f"gpu_autoscaler_price_age_seconds{{{_A}}}": "21700+60x25"},
        silent=(
            {f"gpu_autoscaler_price_age_seconds{{{_A}}}": "300x25"},
            {f"gpu_autoscaler_price_age_seconds{{{_A}}}": _UNKNOWN},
        ),
        labels={"pod": "controller-a"},
    ),
    "GpuAutoscalerPriceUnknown": Case(
        fires={'gpu_autoscaler_instances_without_price{pod="cost-tracker"}': "0x2 1x23"},
        silent=({'gpu_autoscaler_instances_without_price{pod="cost-tracker"}': "1x4 0x2 1x12 0x10"},),
        labels={"pod": "cost-tracker"},
    ),
}
