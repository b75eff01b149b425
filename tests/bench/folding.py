"""How many recorded facts become state in a second, beside how long it takes only to decode them."""

import gc
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec
from tests.bench.line import Line

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.catalog import FACT_CATALOG
from gpu_autoscaler.events.envelope import Envelope, Recorded, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.pod import PodGone, PodObserved
from gpu_autoscaler.model.ids import FactId, PodUid
from gpu_autoscaler.model.resources import Resources

PODS_COUNT = 20_000  # each with five facts
RUNS_COUNT = 5
BATCH_COUNT = 1_000
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
RATIO_MAX = 1.5  # folding is to cost little beside reading; our own aim


def measure() -> list[Line]:
    """Medians of five runs, decode and fold in turn."""
    payloads = [encode(envelope) for envelope in history()]
    decoded: list[Envelope] = []
    decode_seconds, fold_seconds = [], []
    for _ in range(RUNS_COUNT):
        decoded = [FACT_CATALOG.decode(payload) for payload in payloads]
        decode_seconds.append(seconds_of(lambda: [FACT_CATALOG.decode(payload) for payload in payloads]))
        recorded = [
            Recorded(envelope=envelope, stream="POD", sequence=number) for number, envelope in enumerate(decoded, 1)
        ]
        batches = [recorded[start : start + BATCH_COUNT] for start in range(0, len(recorded), BATCH_COUNT)]
        fold_seconds.append(seconds_of(partial(fold_all, batches)))
    ratio = statistics.median(fold_s / decode_s for fold_s, decode_s in zip(fold_seconds, decode_seconds, strict=True))
    return [
        Line(
            case="FOLD rate",
            value=len(payloads) / statistics.median(fold_seconds),
            unit="facts/s",
            against=f"{len(payloads):,} pod facts in batches of {BATCH_COUNT:,}",
        ),
        Line(
            case="FOLD",
            value=ratio,
            unit="x",
            against="decoding the same facts",
            target=f"<= {RATIO_MAX}",
            met=ratio <= RATIO_MAX,
        ),
    ]


def fold_all(batches: list[list[Recorded]]) -> None:
    """Fold every batch onto the one before."""
    state = EMPTY_STATE
    for batch in batches:
        state = fold(state, batch)
    assert not state.pods, "every pod of the history is gone in the end"


def seconds_of(work: Callable[[], object]) -> float:
    """How long it took, with the garbage of others collected before."""
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def history(pods_count: int = PODS_COUNT) -> list[Envelope]:
    """Pods that come, wait, are bound, run and go, a hundred at a time: five facts each."""
    facts: list[tuple[datetime, Fact]] = []
    for number in range(pods_count):
        at = NOON + timedelta(seconds=number / 10)
        uid = PodUid(f"pod-{number}")
        seen = PodObserved(
            pod_uid=uid, namespace="bench", name=f"pod-{number}", phase="pending", requests=Resources(gpu_count=1),
            created_at=at, epoch=1, version=5 * number,
        )  # fmt: skip
        facts.append((at, seen))
        changes: tuple[dict[str, object], ...] = (
            {"unschedulable_since": at},
            {"node_name": f"node-{number % 500}"},
            {"phase": "running"},
        )
        for step, change in enumerate(changes, 1):
            changed = msgspec.structs.replace(seen, **change, version=5 * number + step)
            facts.append((at + timedelta(seconds=10 * step), changed))
        gone = PodGone(pod_uid=uid, namespace="bench", name=f"pod-{number}", epoch=1, version=5 * number + 4)
        facts.append((at + timedelta(seconds=100), gone))
    facts.sort(key=lambda item: item[0])
    return [Envelope(id=FactId(str(fact.condition())), source="/bench", time=at, fact=fact) for at, fact in facts]
