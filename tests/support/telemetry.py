"""Minutes of a node's telemetry in one line: `minutes("n1", 30, busy=0.9)`."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
from tests.support.timed_facts import MINUTE, T0, Story, TimedFact

from gpu_autoscaler.events.gpu import GpuNodeSummarized, GpuSummary
from gpu_autoscaler.model.ids import NodeUid


def minute(
    name: str,
    at: datetime,
    *,
    gpus: int = 8,
    busy: float | None = 0.9,
    celsius: float | None = 65.0,
    watts: float | None = None,
    pods: Mapping[int, str] | None = None,
    sick: Mapping[int, Mapping[str, Any]] | None = None,
    is_silent: bool = False,
) -> Story:
    """The minute that begins `at`: every GPU alike, but for those in `sick`, which have these fields instead.

    `pods`: namespace/name of who held a GPU, by its number. Power varies from minute to minute unless `watts` is given.
    """
    wavering = 200.0 + int(at.timestamp()) // 60 % 7 if watts is None else watts
    summaries = tuple(
        msgspec.structs.replace(
            GpuSummary(
                gpu=str(number),
                gpu_uuid=f"GPU-{name}-{number}",
                samples_count=6,
                utilization_ratio_min=busy,
                utilization_ratio_mean=busy,
                utilization_ratio_max=busy,
                temperature_celsius_min=celsius,
                temperature_celsius_max=celsius,
                power_watts_mean=wavering,
                pod=(pods or {}).get(number),
                xid_last=0,
                is_row_remap_failed=False,
                ecc_double_bit_count=0,
            ),
            **(sick or {}).get(number, {}),
        )
        for number in range(0 if is_silent else gpus)
    )
    fact = GpuNodeSummarized(
        epoch=1,
        version=int(at.timestamp()),
        node_uid=NodeUid(f"uid-{name}"),
        node_name=name,
        window_started_at=at,
        window_seconds=60.0,
        scrapes_expected_count=6,
        scrapes_answered_count=0 if is_silent else 6,
        gpus=summaries,
    )
    return (TimedFact(fact, at + MINUTE),)


def minutes(name: str, count: int, *, start: datetime = T0, **figures: Any) -> Story:  # noqa: ANN401 - those of `minute`
    """Return `count` equal consecutive minutes."""
    return tuple(told for number in range(count) for told in minute(name, start + number * MINUTE, **figures))
