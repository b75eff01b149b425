"""The pod watcher with pods that have volumes, device claims and groups: processor time of one event and of a list.

Every pod has a volume claim with a volume and a device claim; ten share a pod group.
"""

import asyncio
import gc
import time
from collections.abc import Sequence
from statistics import median

from tests.bench.line import Line
from tests.support.watch_items import (
    changed,
    claiming_pods,
    device_spec,
    listed,
    new_watcher,
    related_lists,
    thing,
    volume_spec,
)

from gpu_autoscaler.kube.protocol import DEVICE_CLAIMS, GROUPS, PODS, VOLUMES, WatchItem
from gpu_autoscaler_services.pod_watcher.service import PodWatcher

FEW, MANY = 1_000, 10_000
EVENTS_COUNT = 100
VERSION = 1_000_000  # after all lists
EVENT_RATIO_MAX, LIST_RATIO_MAX = 3.0, 20.0  # about 1 and 10, with room for caches and other work on the machine
EVENT_MILLISECONDS_MAX, LIST_SECONDS_MAX, TURN_MILLISECONDS_MAX = 10.0, 5.0, 100.0
TOLERANCE = 5.0  # of absolute times, which move with the machine


class _Figures:
    """Processor times of one number of pods."""

    list_seconds = 0.0
    turn_seconds = 0.0  # the longest time without a turn for another task
    event_seconds = 0.0  # of the kind of event that takes longest


def measure() -> list[Line]:
    """Return the figures of 10,000 pods, and their ratios to those of 1,000."""
    few, many = asyncio.run(_measure(FEW)), asyncio.run(_measure(MANY))
    of = f"{MANY:,} pods with a volume, a device claim and a group"
    ratios = (
        ("event", many.event_seconds / few.event_seconds, EVENT_RATIO_MAX),
        ("list", many.list_seconds / few.list_seconds, LIST_RATIO_MAX),
    )
    times = (
        ("event, processor time", many.event_seconds * 1000, "ms", EVENT_MILLISECONDS_MAX),
        ("list, processor time", many.list_seconds, "s", LIST_SECONDS_MAX),
        ("list, longest turn", many.turn_seconds * 1000, "ms", TURN_MILLISECONDS_MAX),
    )
    return [
        *(
            Line(
                case=f"RELATED {name}",
                value=value,
                unit="x",
                against=f"{FEW:,} pods",
                target=f"<= {limit:g}",
                met=value <= limit,
            )
            for name, value, limit in ratios
        ),
        *(
            Line(
                case=f"RELATED {name}",
                value=value,
                unit=unit,
                against=of,
                target=f"<= {limit:g}",
                met=value <= limit,
                is_tolerated=value <= limit * TOLERANCE,
            )
            for name, value, unit, limit in times
        ),
    ]


async def _measure(count: int) -> _Figures:
    figures, watcher = _Figures(), new_watcher()
    for item in related_lists(count):
        await watcher.on_item(item)
    pods, turns = listed(PODS, *claiming_pods(count), version=VERSION), list[float]()
    other = asyncio.create_task(_turns(turns))
    await asyncio.sleep(0)
    gc.collect()
    began = time.process_time()
    facts = await watcher.on_item(pods)
    figures.list_seconds = time.process_time() - began
    await asyncio.sleep(0)
    other.cancel()
    assert len(facts) == count + 1
    assert len(turns) > 1
    figures.turn_seconds = max(turns)
    # Each event changes something for the pods of the object: one pod, or the ten of a group.
    changes = (
        (VOLUMES, "v", {"spec": volume_spec("b")}),
        (GROUPS, "g", {"spec": {"minMember": 3}}),
        (DEVICE_CLAIMS, "d", {"spec": device_spec("gpu.nvidia.com", 2)}),
    )
    events = [
        [changed(kind, thing(kind, f"{prefix}{number}", VERSION + number, **fields)) for number in range(EVENTS_COUNT)]
        for kind, prefix, fields in changes
    ]
    figures.event_seconds = max([await _of_one(watcher, items) for items in events])
    return figures


async def _turns(turns: list[float]) -> None:
    """Append the processor time between two turns of this task."""
    while True:
        began = time.process_time()
        await asyncio.sleep(0)
        turns.append(time.process_time() - began)


async def _of_one(watcher: PodWatcher, items: Sequence[WatchItem]) -> float:
    """Return the median processor time of one of these items, each of which publishes facts."""
    seconds = []
    for item in items:
        began = time.process_time()
        facts = await watcher.on_item(item)
        seconds.append(time.process_time() - began)
        assert facts
    return median(seconds)
